/* Sorting, filtering, dialogs and charts. The page is whole without it: tables, notes and numbers stand in the HTML. */
(() => {
"use strict";
const all = (what, where = document) => [...where.querySelectorAll(what)];
const one = (what, where = document) => where.querySelector(what);
const data = JSON.parse(one("#data").textContent);

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
    if (board.closest("details.fold")) board.closest("details.fold").open = true;
  }
  filter();
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
  (one(".side", place) ?? one(".scroll", place)).after(bar);
}

// --- charts: Vega-Lite, drawn as SVG when they come into sight; "currentColor" follows the theme and the printer
const config = {
  background: null, font: getComputedStyle(root).getPropertyValue("--sans"), view: { stroke: null },
  axis: { labelColor: "currentColor", titleColor: "currentColor", tickColor: "currentColor", domainColor: "currentColor", gridColor: "currentColor",
    gridOpacity: 0.12, domainOpacity: 0.5, tickOpacity: 0.5, labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal", labelOpacity: 0.8 },
  legend: { labelColor: "currentColor", labelFontSize: 11, symbolType: "stroke" }, range: { category: data.colours },
};
const hidden = {}; // figure -> names that its legend has off
const draw = async (element) => {
  const { chart, panel, point } = element.dataset;
  const spec = structuredClone(point ? data.spec : data.charts[chart].spec);
  let rows;
  if (point) {
    const metric = one(`[data-curve="${point}"]`).value, curve = data.points[point][metric];
    rows = Object.entries(curve.seeds).flatMap(([seed, [at, values]]) => at.map((x, i) => ({ name: `seed ${seed}`, x, mean: values[i] })));
    for (const layer of spec.layer) if (layer.encoding.y) layer.encoding.y.title = curve.title;
  } else {
    const { panels, fields } = data.charts[chart];
    rows = panels[panel].map((row) => Object.fromEntries(fields.map((field, i) => [field, row[i]])));
    rows = rows.filter((row) => !hidden[chart]?.has(row.name));
  }
  const rounds = [...new Set(rows.map((row) => row.x))];
  for (const { encoding: { x } } of spec.layer) if (x.axis?.format === "d" && rounds.length < 7) x.axis.values = rounds;
  spec.datasets = { rows };
  spec.width = element.clientWidth;
  spec.autosize = { type: "fit-x", contains: "padding" };
  spec.description = element.dataset.said ??= element.ariaLabel;
  const result = await vegaEmbed(element, spec, { actions: false, renderer: "svg", ast: true, config, tooltip: { theme: "custom" } });
  result.view.addEventListener("click", (_, item) => { if (item?.datum?.href) location.href = item.datum.href; });
  for (const svg of all("svg", element)) svg.setAttribute("aria-hidden", "true");
  element.dataset.drawn = "";
};
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
}, { rootMargin: "400px" });
for (const element of all("[data-chart]")) seen.observe(element);
let late = 0;
addEventListener("resize", () => { clearTimeout(late); late = setTimeout(() => all("[data-drawn]").filter((e) => e.clientWidth).forEach(draw), 200); });
addEventListener("beforeprint", () => { for (const element of all("[data-chart]:not([data-drawn])")) draw(element); });
for (const legend of all("[data-legend]")) {
  const id = legend.dataset.legend, { names } = data.charts[id];
  hidden[id] = new Set();
  if (names.length < 2) { legend.hidden = true; continue; }
  for (const [text, colour, dashes] of names) {
    const label = document.createElement("label"), box = document.createElement("input"), line = document.createElement("i");
    box.type = "checkbox";
    box.checked = true;
    line.style.color = colour;
    line.style.borderTopStyle = ["solid", "dashed", "dotted"][dashes] ?? "double";
    label.append(box, line, text);
    legend.append(label);
    box.addEventListener("change", () => {
      hidden[id][box.checked ? "delete" : "add"](text);
      for (const element of all(`[data-chart="${id}"]`)) draw(element);
    });
  }
}
for (const select of all("[data-curve]")) select.addEventListener("input", () => draw(one(`[data-point="${select.dataset.curve}"]`)));

// --- what is behind a number: the address names it, so that it can be sent to somebody
let opener = null, asked = "";  // the link that was followed, and the heading that its number stands under
const unfold = () => {
  const place = document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("details.fold");
  if (place && !place.open) { place.open = true; place.scrollIntoView(); }
};
const show = () => {
  const id = decodeURIComponent(location.hash.slice(1)), dialog = id && document.getElementById(id);
  for (const other of all("dialog[open]")) if (other !== dialog) other.close();
  if (dialog?.matches?.("dialog:not([open])")) {
    dialog.showModal();
    dialog.scrollTop = 0;
    for (const row of all("tbody tr", dialog)) row.classList.toggle("asked", asked !== "" && one("th", row)?.textContent.trim() === asked);
    for (const element of all("[data-point]:not([data-drawn])", dialog)) draw(element);
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
