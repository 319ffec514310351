"""Escape text for LaTeX, with formulas where a sentence has one."""

from __future__ import annotations

import re
import unicodedata

_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''", "`": r"\textasciigrave{}", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "−": r"$-$",
    "≤": r"$\leq$", "≥": r"$\geq$", "≠": r"$\neq$", "≈": r"$\approx$", "→": r"$\rightarrow$", "∞": r"$\infty$",
    "∈": r"$\in$", "∑": r"$\sum$", "…": r"\ldots{}", "–": "--", "—": "---", "’": "'", "‘": "`", "“": "``", "”": "''",
    "†": r"\textdagger{}", "‡": r"\textdaggerdbl{}", "§": r"\S{}", "¶": r"\P{}", "°": r"$^\circ$", "₂": "$_2$",
    "↓": r"$\downarrow$", "Δ": r"$\Delta$", "ε": r"$\varepsilon$", "ϵ": r"$\epsilon$", "π": r"$\pi$",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ζ": "zeta", "η": "eta", "θ": "theta", "ι": "iota",
    "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "ρ": "rho", "σ": "sigma", "τ": "tau", "υ": "upsilon",
    "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi",
    "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_SPECIAL |= {letter: f"$\\{name}$" for letter, name in _GREEK.items()}
_SPECIAL |= {
    "⁄": "/", "‐": "-", "‑": "-", "‒": "--", "′": "$'$", "″": "$''$", "‖": r"$\|$", "ℓ": r"$\ell$", "∇": r"$\nabla$",
    "∂": r"$\partial$", "√": r"$\surd$", "∘": r"$\circ$", "∅": r"$\emptyset$", "∀": r"$\forall$", "∃": r"$\exists$",
    "∩": r"$\cap$", "∪": r"$\cup$", "⊂": r"$\subset$", "⊆": r"$\subseteq$", "∝": r"$\propto$", "∼": r"$\sim$",
    "≡": r"$\equiv$", "≪": r"$\ll$", "≫": r"$\gg$", "⊕": r"$\oplus$", "⊗": r"$\otimes$", "∗": r"$\ast$",
    "←": r"$\leftarrow$", "↑": r"$\uparrow$", "↔": r"$\leftrightarrow$", "⇒": r"$\Rightarrow$", "÷": r"$\div$",
    "⟨": r"$\langle$", "⟩": r"$\rangle$", "€": r"\texteuro{}", "©": r"\textcopyright{}", "®": r"\textregistered{}",
    "™": r"\texttrademark{}", "¡": "!`", "¿": "?`", "„": ",,", "‚": ",", "•": r"\textbullet{}", "✓": r"$\surd$",
    "ϑ": r"$\vartheta$", "ϕ": r"$\phi$", "ο": "o", "ς": r"$\varsigma$", "⋅": r"$\cdot$",
}  # fmt: skip
_COMBINING = {"\u0302": r"\hat", "\u0303": r"\tilde", "\u0304": r"\bar", "\u0305": r"\bar", "\u0307": r"\dot"}
_RAISED = {"<super>": "^", "<sub>": "_"}  # of Unicode's decompositions
LATIN = "\u00c0-\u017e"  # letters that inputenc knows, with those of ASCII


def escape(words: str) -> str:
    """Escape text for LaTeX; a character that pdfLaTeX cannot print becomes what Unicode says it is made of.

    One without such parts stays as it is, see `printable`.
    """
    words = unicodedata.normalize("NFC", " ".join(words.split()))  # what can be one letter is no combining mark
    escaped: list[str] = []
    for character in words:
        if character in _COMBINING and escaped:
            escaped[-1] = f"${_COMBINING[character]}{{{escaped[-1].strip('$')}}}$"
        else:
            escaped.append(_escape_one(character))
    return "".join(escaped)


def _escape_one(character: str) -> str:
    if character in _SPECIAL:
        return _SPECIAL[character]
    kind, *parts = unicodedata.decomposition(character).split() or [""]
    if character.isascii() or re.match(f"[{LATIN}]", character) or not (kind or parts):
        return character
    codes = parts if kind.startswith("<") else [kind, *parts]
    text = "".join(_escape_one(chr(int(code, 16))) for code in codes)
    if kind == "<fraction>":
        return rf"\,{text}"  # 1½ is not 11/2
    return f"${_RAISED[kind]}{{{text.strip('$')}}}$" if kind in _RAISED else text


def printable(text: str) -> tuple[str, list[str]]:
    """(LaTeX with "?" for each letter that pdfLaTeX would lose, those letters); comments keep theirs."""
    lost: dict[str, None] = {}

    def printed(found: re.Match[str]) -> str:
        letter = found[0]
        if len(letter) > 1 or letter == "%":
            return letter
        if (escaped := _escape_one(letter)) != letter:  # tables of tabulate escape only the signs of LaTeX itself
            return escaped
        lost[letter] = None
        return "" if unicodedata.combining(letter) else "?"

    return re.sub(f"^%.*|[^\x00-\x7f{LATIN}]", printed, text, flags=re.MULTILINE), list(lost)


def caption_title(name: str, label: str) -> str:
    """The first sentence of a caption, and the warning of a reduced preset if there is one."""
    return escape(f"{name}.") + (rf" \textbf{{{escape(label)}.}}" if label else "")


FORMULAS = {"Linf": r"$\ell_\infty$", "L2": r"$\ell_2$", "K - 1": "$K - 1$"}
RELATIONS = {">=": r"\geq", "<=": r"\leq"}


def prose(words: str) -> str:
    """As `escape`, with "p >= 0.05" and names of norms as formulas."""
    pieces = re.split(r"\b(p (?:>=|<=|[<>=]) [0-9.]+(?:e-?\d+)?|K - 1|Linf|L2)\b", words)
    for i in range(1, len(pieces), 2):
        pieces[i] = FORMULAS.get(pieces[i]) or "$" + " ".join(RELATIONS.get(p, p) for p in pieces[i].split()) + "$"
    return "".join(piece if i % 2 else _escape_piece(piece) for i, piece in enumerate(pieces))


def _escape_piece(piece: str) -> str:
    """Escape a part of a sentence and keep the spaces at its ends."""
    return f"{' ' * piece.startswith(' ')}{escape(piece)}{' ' * (piece.endswith(' ') and bool(piece.strip()))}"


def superscript(symbol: str) -> str:
    """A mark behind a number, no smaller than a spread; empty without one."""
    return rf"\raisebox{{.6ex}}{{\scriptsize {escape(symbol.replace('°', '∘'))}}}" if symbol else ""


def small_type(words: str) -> str:
    """LaTeX of a spread behind its number."""
    return rf"{{\scriptsize\,{words}}}" if words else ""


def signs(number: str) -> str:
    """A number with its signs as formulas."""
    return number.replace("-", "$-$").replace("+", "$+$").replace("±", r"$\pm$")
