// Tables that sort and filter. Without this script they are plain tables.
"use strict";
(() => {
  const MIN_FILTERED = 11;
  const make = (tag, values = {}) => Object.assign(document.createElement(tag), values);
  const order = new Intl.Collator("en", { numeric: true });

  function sortBy(table, column, header) {
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const body = table.tBodies[0];
    const key = (row) => {
      const cell = row.cells[column];
      return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
    };
    const rank = (value) => (typeof value === "number" ? 0 : value === "" || value === "–" ? 2 : 1);
    const compare = (a, b) =>
      rank(a) - rank(b) ? rank(a) - rank(b) : (ascending ? 1 : -1) * (typeof a === "number" ? a - b : order.compare(a, b));
    const rows = Array.from(body.rows, (row) => [key(row), row]);
    rows.sort((a, b) => compare(a[0], b[0]));
    body.append(...rows.map((row) => row[1]));
  }

  function addFilter(table) {
    const body = table.tBodies[0];
    const name = table.caption.textContent;
    const field = make("input", { type: "search", ariaLabel: `Filter the rows: ${name}`, placeholder: "filter" });
    const count = make("span", { textContent: `${body.rows.length} rows` });
    count.setAttribute("role", "status");
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      count.textContent = shown === body.rows.length ? `${shown} rows` : `${shown} of ${body.rows.length} rows`;
    });
    const tools = make("div", { className: "tools" });
    tools.append(field, count);
    (table.closest(".table") ?? table).before(tools);
  }

  // Only a table that is wider than its place needs the keyboard to scroll it.
  const widths = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const scrolls = target.scrollWidth > target.clientWidth;
      const name = target.querySelector("caption")?.textContent;
      if (scrolls) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
      target.ariaLabel = scrolls ? `${name}, scrolls sideways` : name;
    }
  });

  function enhance(root) {
    for (const place of root.querySelectorAll(".table")) widths.observe(place);
    for (const table of root.querySelectorAll("table[data-sort]")) {
      table.removeAttribute("data-sort");
      Array.from(table.tHead.rows[0].cells).forEach((header, column) => {
        if (!header.textContent.trim()) return;
        const button = make("button", { type: "button" });
        button.append(...header.childNodes);
        button.addEventListener("click", () => sortBy(table, column, header));
        header.append(button);
      });
      if (table.tBodies[0].rows.length >= MIN_FILTERED) addFilter(table);
    }
  }
  enhance(document);
  // For content that arrives later.
  window.tracestore = { ...window.tracestore, enhance };
})();
