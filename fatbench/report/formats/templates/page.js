/* Sorting, filtering, dialogs. The page is whole without it: tables, notes and numbers stand in the HTML. */
(() => {
"use strict";
const all = (what, where = document) => [...where.querySelectorAll(what)];
const one = (what, where = document) => where.querySelector(what);

// --- light and dark: as the system is, until asked otherwise
const root = document.documentElement, theme = one("#theme");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const remembered = (value) => { try { if (value) localStorage.setItem("fatbench-theme", value); return localStorage.getItem("fatbench-theme"); } catch { return value; } };
const name = () => { theme.textContent = dark() ? "Light" : "Dark"; };
if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
theme.hidden = false;
theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; remembered(root.dataset.theme); name(); });
name();

// --- leaderboards
const unfoldTo = (place) => { // unfolds what holds it; whether something was folded
  const folded = all("details.fold:not([open])").filter((fold) => fold.contains(place));
  for (const fold of folded) fold.open = true;
  return folded.length > 0;
};
const value = (cell, shown) => {
  const { measured, published } = cell.dataset;
  const text = shown === "published" ? published : shown === "measured" ? measured : measured ?? published;
  return text === undefined ? null : Number(text);
};
const FIRST = 12; // rows of a long leaderboard, until all are asked for
const address = new URLSearchParams(location.search); // how the leaderboards of the page are sorted and filtered
const keep = (name, text) => {
  if (text) address.set(name, text); else address.delete(name);
  history.replaceState(null, "", location.pathname + (String(address) && `?${address}`) + location.hash);
};
for (const board of all("[data-board]")) {
  const form = one(".controls", board), body = one("tbody", board), rows = all("tr", body), output = one("output", board);
  const heads = all("thead th", board), more = rows.length > FIRST + 3 ? one("[data-more]", board) : null;
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  if (more) more.addEventListener("click", () => {
    more.ariaExpanded = String(more.ariaExpanded !== "true");
    more.textContent = more.ariaExpanded === "true" ? `Only the first ${FIRST} rows` : `All ${rows.length} rows`;
    filter();
  });
  const shown = () => one("[data-show]", form)?.value ?? "both";
  const controls = all("[data-filter], [data-axis], [data-show]", form).map((control) => [`${board.id}.${control.dataset.axis ?? ("show" in control.dataset ? "show" : "filter")}`, control]);
  const sort = () => {
    const at = heads.findIndex((head) => head.ariaSort);
    if (at < 0) return;
    const sign = heads[at].ariaSort === "ascending" ? 1 : -1, text = heads[at].dataset.sort === "text";
    const of = (row) => text ? row.cells[at].textContent.trim() : value(row.cells[at], shown());
    const compare = (a, b) => {
      const [x, y] = [of(a), of(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (text ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    };
    body.append(...[...rows].sort(compare));
  };
  const filter = () => {
    board.dataset.shown = shown();
    const words = one("[data-filter]", form).value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = all("[data-axis]", form).filter((select) => select.value);
    const place = (axis) => heads.findIndex((head) => head.textContent.trim() === axis);
    let count = 0, free = words.length || chosen.length || !more || more.ariaExpanded === "true" ? Infinity : FIRST;
    for (const row of body.rows) {
      const labels = all(".stub", row).map((cell) => cell.textContent.trim()).join(" ").toLowerCase();
      const fits = words.every((word) => labels.includes(word))
        && chosen.every((select) => row.cells[place(select.dataset.axis)].textContent.trim() === select.value)
        && (shown() === "both" || all("td", row).some((cell) => value(cell, shown()) !== null));
      row.hidden = !fits || free < 1;
      free -= fits;
      count += fits;
    }
    output.textContent = `${count} of ${rows.length} rows`;
    if (more) more.hidden = free === Infinity && more.ariaExpanded !== "true";
  };
  for (const head of heads) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const first = head.dataset.sort === "max" ? "descending" : "ascending";
      const next = !head.ariaSort ? first : head.ariaSort === "ascending" ? "descending" : "ascending";
      for (const other of heads) other.ariaSort = null;
      head.ariaSort = next;
      sort();
      filter();
      keep(`${board.id}.sort`, `${head.textContent.trim()} ${next}`);
    });
  }
  const first = Object.fromEntries(controls.map(([name, control]) => [name, control.value]));
  form.addEventListener("input", () => {
    sort();
    filter();
    for (const [name, control] of controls) keep(name, control.value === first[name] ? "" : control.value);
  });
  if (more) { more.ariaExpanded = "false"; more.textContent = `All ${rows.length} rows`; }
  for (const [name, control] of controls) if (address.has(name)) control.value = address.get(name);
  const [, heading, order] = address.get(`${board.id}.sort`)?.match(/^(.*) (ascending|descending)$/) ?? [];
  const asked = heading === undefined ? null : heads.find((head) => head.textContent.trim() === heading);
  if (asked) for (const head of heads) head.ariaSort = head === asked ? order : null;
  if ([...address.keys()].some((name) => name.startsWith(`${board.id}.`))) {
    sort();
    unfoldTo(board);
  }
  filter();
}

// --- the search of the index: rows whose question or methods have every word, with the places of the methods found
const search = one("#search");
if (search) {
  const rows = all(".overview tr[data-rows]"), input = one("input", search), texts = rows.map((row) => one(".order > span", row).innerHTML);
  search.hidden = false;
  search.addEventListener("submit", (event) => event.preventDefault());
  const find = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean), has = (text) => words.filter((word) => text.toLowerCase().includes(word));
    rows.forEach((row, i) => {
      const labels = row.dataset.rows.split("\n"), found = labels.map((label, at) => [label, at + 1]).filter(([label]) => has(label).length);
      row.hidden = has(`${one("th", row).textContent} ${labels.join(" ")}`).length < words.length;
      const order = one(".order > span", row);
      if (words.length && found.length && found.length < labels.length) order.textContent = `${found.slice(0, 4).map(([label, at]) => `${at}\u00a0${label}`).join(", ")}${found.length > 4 ? ", \u2026" : ""} of ${labels.length}`;
      else order.innerHTML = texts[i];
    });
    for (const group of all(".overview tbody")) group.hidden = all("tr[data-rows]", group).every((row) => row.hidden);
    one("output", search).textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} questions` : "";
    keep("search", input.value);
  };
  input.addEventListener("input", find);
  input.value = address.get("search") ?? "";
  find();
}

// --- to take away: a table as LaTeX, CSV or Markdown
const words = (cell) => cell.innerText.replace(/\s+/g, " ").trim();
const grid = (table) => all("tr", table).filter((row) => !row.hidden).map((row) => all("th, td", row).flatMap((cell) => [words(cell), ...Array(cell.colSpan - 1).fill("")]));
const plain = (text) => /^[=@+-](?![\d.])/.test(text) ? `'${text}` : text; // a name is no formula of a spreadsheet
const forms = {
  LaTeX: (place) => one("details.source pre", place).textContent,
  CSV: (place) => grid(one("table", place)).map((row) => row.map(plain).map((cell) => /[",\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell).join(",")).join("\n") + "\n",
  Markdown: (place) => { const [head, ...rows] = grid(one("table", place)).map((row) => `| ${row.map((cell) => cell.replaceAll("|", "\\|")).join(" | ")} |`);
    return [head, head.replace(/[^|]+/g, "---"), ...rows].join("\n") + "\n"; },
};
for (const place of all("section.table, section.board")) {
  const bar = document.createElement("div");
  bar.className = "take";
  for (const [name, form] of Object.entries(forms)) {
    if (name === "LaTeX" && !one("details.source pre", place)) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet";
    button.textContent = `Copy ${name}`;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(form(place));
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = `Copy ${name}`; }, 1500);
    });
    bar.append(button);
  }
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = "Download CSV";
  button.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(["\ufeff", forms.CSV(place)], { type: "text/csv" })); // the mark tells Excel of UTF-8
    link.download = `${place.id}.csv`;
    link.click();
    URL.revokeObjectURL(link.href);
  });
  bar.append(button);
  one(".scroll", place).after(bar);
}

// --- paper has no folds: the notes of tables are printed
addEventListener("beforeprint", () => { for (const fold of all("section.table > .notes-fold:not([open])")) { fold.open = true; fold.dataset.printed = ""; } });
addEventListener("afterprint", () => { for (const fold of all(".notes-fold[data-printed]")) { fold.open = false; delete fold.dataset.printed; } });

// --- a legend takes lines away
for (const box of all("[data-toggle]")) box.addEventListener("change", () => {
  for (const line of all(`[data-line="${box.dataset.toggle}"]`, box.closest("section"))) line.style.display = box.checked ? "" : "none";
});

// --- what is behind a number: the address names it, so that it can be sent to somebody
let opener = null, asked = "";  // the link that was followed, and the heading that its number stands under
const unfold = () => {
  const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (place && unfoldTo(place)) place.scrollIntoView();
};
const show = () => {
  const id = decodeURIComponent(location.hash.slice(1)), dialog = id && document.getElementById(id);
  for (const other of all("dialog[open]")) if (other !== dialog) other.close();
  if (dialog?.matches?.("dialog:not([open])")) {
    dialog.showModal();
    dialog.scrollTop = 0;
    for (const row of all("tbody tr", dialog)) row.classList.toggle("asked", asked !== "" && one("th", row)?.textContent.trim() === asked);
  }
};
for (const link of all("a.number")) link.addEventListener("click", () => {
  opener = link;
  const cell = link.closest("td");
  asked = [...one("thead tr:last-child", cell.closest("table")).cells][cell.cellIndex]?.textContent.trim() ?? "";
});
for (const dialog of all("dialog")) {
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("close", () => {
    if (location.hash.slice(1) !== dialog.id) return;
    const place = scrollY;
    history.pushState(null, "", location.pathname + location.search);
    scrollTo({ top: place, behavior: "instant" });
    opener?.focus({ preventScroll: true });
  });
}
addEventListener("hashchange", show);
addEventListener("hashchange", unfold);
unfold();
show();
})();
