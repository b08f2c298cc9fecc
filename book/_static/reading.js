// For the reader: figures open in place, wide tables, formulas and code scroll with a cue, tables have one
// header row and stand row under row on a phone, hidden code that follows hidden code opens with it, and what the
// theme leaves without a name has one.
(() => {
  const wide = "div.math mjx-container, mjx-container.kl-wide, .kl-scroll, div.highlight pre";
  const phone = window.matchMedia("(max-width: 575.98px)");
  const mark = (box) => {
    const more = box.scrollWidth > box.clientWidth + 1;
    box.classList.toggle("kl-more", more);
    if (more) box.setAttribute("tabindex", "0");
    else box.removeAttribute("tabindex");
    box.classList.toggle("kl-end", box.scrollLeft + box.clientWidth >= box.scrollWidth - 2);
  };
  // pandas heads an indexed frame with two rows, one of them empty but for the index's name.
  const oneHeader = (table) => {
    const rows = table.tHead ? [...table.tHead.rows] : [];
    if (rows.length !== 2) return;
    const [columns, names] = rows.map((row) => [...row.cells]);
    const fits = columns.length === names.length && columns.every((cell, i) =>
      !cell.textContent.trim() || !names[i].textContent.trim());
    if (!fits) return;
    names.forEach((cell, i) => { if (cell.textContent.trim()) columns[i].innerHTML = cell.innerHTML; });
    rows[1].remove();
  };
  // A table too wide for a phone, or whose columns are a word wide there, stands row under row, each cell
  // beside the name of its column.
  const stack = (table) => {
    table.classList.remove("kl-stack");
    const heads = table.tHead?.rows.length === 1 ? [...table.tHead.rows[0].cells] : [];
    if (!phone.matches || !heads.length || !table.tBodies.length) return;
    const box = table.parentElement, rows = [...table.tBodies[0].rows];
    const fits = box.scrollWidth <= box.clientWidth + 1 && rows.every((row) => row.clientHeight < 360);
    if (fits) return;
    // A cell over several rows leaves fewer to those below it, which repeat what it says.
    const over = [];
    for (const row of rows) {
      const missing = heads.length - row.cells.length;
      if (missing > 0) row.dataset.over = over.slice(0, missing).map((said, i) => `${heads[i].textContent.trim()} ${said}`).join(", ");
      [...row.cells].forEach((cell, i) => {
        cell.dataset.column = heads[i + missing]?.textContent.trim() ?? "";
        over[i + missing] = cell.textContent.trim();
      });
    }
    table.classList.add("kl-stack");
  };
  // Cells of hidden code that show nothing, one after the other, are one line to open.
  const oneBar = (cell) => {
    const [hidden, next] = [cell, cell.nextElementSibling].map((c) => c?.matches("div.cell") && c.querySelector(":scope > details.hide"));
    if (!hidden || !next || cell.querySelector(":scope > .cell_output")) return;
    next.querySelector("summary").after(...[...hidden.children].filter((part) => part.localName !== "summary"));
    cell.remove();
  };
  // A table is called as its caption says, or as the section that it stands in, with its number there.
  const called = new Map();
  const nameOf = (table) => {
    const chinese = document.documentElement.lang.startsWith("zh");
    const heading = table.closest("section")?.querySelector("h1, h2, h3, h4")?.cloneNode(true);
    heading?.querySelectorAll(".headerlink").forEach((link) => link.remove());
    const of = table.caption?.textContent.trim() || heading?.textContent.trim() || document.title;
    const number = (called.get(of) ?? 0) + 1;
    called.set(of, number);
    return `${chinese ? "表" : "table"}${number > 1 ? ` ${number}` : ""}: ${of}`;
  };
  // A formula and the punctuation behind it, or the bracket before it, stand in one line.
  const hold = (formula) => {
    const [before, after] = [formula.previousSibling, formula.nextSibling].map((node) => node?.nodeType === Node.TEXT_NODE ? node : null);
    const opens = before?.data.match(/[(\[“"]+$/)?.[0] ?? "", closes = after?.data.match(/^[^\s\p{L}\p{N}\\(\[]+/u)?.[0] ?? "";
    if (!opens && !closes) return;
    const box = document.createElement("span");
    box.className = "kl-hold";
    formula.before(box);
    box.append(opens, formula, closes);
    if (opens) before.data = before.data.slice(0, -opens.length);
    if (closes) after.data = after.data.slice(closes.length);
  };
  // A name that a voice reads is the one that an eye reads.
  const name = () => {
    for (const part of document.querySelectorAll("summary[aria-label], button.search-button-field")) {
      if (part.textContent.trim()) part.removeAttribute("aria-label");
    }
    // A list of works holds their anchors, too, which no list may.
    for (const part of document.querySelectorAll(".citation-list, .citation-list > .citation")) {
      part.removeAttribute("role");
    }
    for (const summary of document.querySelectorAll(".bd-links summary")) {
      const of = summary.closest("li")?.querySelector("a")?.textContent.trim();
      if (of && !summary.textContent.trim()) summary.setAttribute("aria-label", `Pages below ${of}`);
    }
  };
  document.addEventListener("DOMContentLoaded", () => {
    name();
    // A page without contents has no button that opens them.
    if (!document.querySelector(".bd-sidebar-secondary, #pst-secondary-sidebar")) {
      document.querySelectorAll(".secondary-toggle").forEach((button) => button.remove());
    }
    const article = document.querySelector("article.bd-article");
    if (!article) return;
    article.querySelectorAll("span.math").forEach(hold);
    article.querySelectorAll("div.cell").forEach(oneBar);
    for (const em of article.querySelectorAll("em")) em.classList.toggle("kl-latin", /^[ -~]*$/.test(em.textContent));
    for (const table of article.querySelectorAll("table")) {
      oneHeader(table);
      if (table.closest(".highlighttable, .kl-scroll")) continue;
      // A name in a table's margin may break behind its underscores.
      for (const head of table.querySelectorAll("tbody th")) {
        if (!head.children.length) head.replaceChildren(...head.textContent.split(/(?<=_)/).flatMap((part) => [part, document.createElement("wbr")]));
      }
      const box = document.createElement("div");
      box.className = "kl-scroll";
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", nameOf(table));
      table.replaceWith(box);
      box.append(table);
    }
    const dialog = document.createElement("dialog");
    dialog.className = "kl-zoom";
    const large = document.createElement("img");
    large.alt = "";
    dialog.append(large);
    dialog.addEventListener("click", () => dialog.close());
    document.body.append(dialog);
    for (const image of article.querySelectorAll("figure img")) {
      const link = image.closest("a") ?? image;
      link.addEventListener("click", (event) => {
        event.preventDefault();
        large.src = image.src;
        large.alt = image.alt;
        dialog.showModal();
        dialog.scrollTo((dialog.scrollWidth - dialog.clientWidth) / 2, 0);
      });
    }
    // MathJax makes each formula a stop of the tabulator, two hundred a page; one that scrolls is enough.
    const heard = new WeakSet();
    const update = () => {
      for (const formula of article.querySelectorAll("mjx-container")) formula.removeAttribute("tabindex");
      for (const formula of article.querySelectorAll("span.math mjx-container")) {
        formula.classList.remove("kl-wide");
        const room = formula.closest("p, li, td, th, dd, figcaption, h1, h2, h3, h4")?.clientWidth || Infinity;
        formula.classList.toggle("kl-wide", formula.firstElementChild.getBoundingClientRect().width > room + 1);
      }
      for (const table of article.querySelectorAll(".kl-scroll > table")) stack(table);
      if (phone.matches) article.querySelectorAll("div.math mjx-container").forEach(klFormulas.fit);
      for (const box of article.querySelectorAll(wide)) {
        mark(box);
        if (!heard.has(box)) box.addEventListener("scroll", () => mark(box), { passive: true });
        heard.add(box);
      }
    };
    window.addEventListener("resize", update);
    // What was hidden had no width: a tab, or a part that opens.
    article.addEventListener("change", update);
    article.addEventListener("toggle", update, true);
    (window.MathJax?.startup?.promise ?? Promise.resolve()).then(update);
    window.addEventListener("load", () => {
      (window.MathJax?.startup?.promise ?? Promise.resolve()).then(update);
    });
  });
})();
