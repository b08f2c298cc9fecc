// The search of the site. The index is half a megabyte, and is loaded when somebody searches. Pages are ranked by what
// they are about: entries of the index (book/index_terms.yaml), headings, then words, rare ones first. Chinese is split
// into pairs of characters, as when the index is built. Excerpts are prose with its formulas.
(() => {
  // The search fetches each page it found to show an excerpt. From a disk the browser refuses that.
  if (window.location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

  const HAN = /\p{Script=Han}+/gu;
  const ASKED = "how why what when which do does did i my me you your we our should can could it its there with from use get has have had am been too very please be so go going always still than".split(" ");
  const WEIGHTS = { entry: 12, title: 6, heading: 4, word: 2, object: 3 };
  // Pages that list everything are about nothing.
  const LISTS = [[/api_|status$|bibliography$|metrics$|methods$|diagnosis_quality$|advice_conditions$/, 0.45], [/ledger$|errata$/, 0.75]];

  // Words of a text, each once: stems of Latin ones, pairs of Chinese characters.
  const tokens = (text) => {
    const stemmer = new Stemmer();
    const lower = text.toLowerCase();
    const found = (lower.match(HAN) ?? []).flatMap((run) =>
      run.length === 1 ? [run] : [...run].slice(1).map((_, i) => run.slice(i, i + 2)));
    const latin = lower.replace(HAN, " ").split(/[^\p{Letter}\p{Number}_]+/gu).filter(Boolean);
    const kept = latin.filter((word) => !stopwords.includes(word) && !ASKED.includes(word));
    found.push(...(kept.length || found.length ? kept : latin).map((word) => /\d/.test(word) ? word : stemmer.stemWord(word)));
    return [...new Set(found)];
  };
  const list = (files) => files === undefined ? [] : Array.isArray(files) ? files : [files];
  const isHan = (word) => /\p{Script=Han}/u.test(word);

  // The weight of each word of the query: the rarer the heavier, and a pair of characters counts half.
  const weights = (asked, index) => {
    const pages = index.docnames.length;
    return new Map(asked.map((word) => {
      const on = new Set([...list(index.terms[word]), ...list(index.titleterms[word])]).size;
      const rare = Math.log((pages + 1) / (Math.min(Math.max(on, 1), pages) + 0.5)) + 0.15;
      return [word, isHan(word) ? rare / 2 : rare];
    }));
  };
  // How well a phrase is what was asked: the share of the query that it has, and of itself that was asked.
  const fit = (phrase, weight, total) => {
    if (!phrase.length) return 0;
    const held = phrase.filter((word) => weight.has(word));
    const asked = held.reduce((sum, word) => sum + weight.get(word), 0) / total;
    return asked * (0.35 + 0.65 * held.length / phrase.length);
  };

  const rank = (query) => {
    const index = Search._index, pages = index.docnames.length;
    const asked = tokens(query), weight = weights(asked, index);
    const total = [...weight.values()].reduce((sum, w) => sum + w, 0) || 1;
    const best = Array.from({ length: pages }, () => ({ entry: 0, title: 0, words: 0, at: "", shown: null, atScore: 0 }));
    const place = (page, score, id, heading) => {
      if (score <= page.atScore) return;
      Object.assign(page, { atScore: score, at: id ? `#${id}` : "", shown: heading });
    };
    const said = query.toLowerCase().trim();
    const headings = new Map(Object.entries(index.alltitles).flatMap(([title, found]) => found.map(([file, id]) => [`${file}#${id}`, title])));
    for (const [entry, found] of Object.entries(index.indexentries)) {
      const score = fit(tokens(entry), weight, total) + (entry === said ? 0.5 : 0);
      if (score < 0.2) continue;
      for (const [file, id, main] of found) {
        const page = best[file], worth = score * (main ? 1 : 0.3);
        page.entry = Math.max(page.entry, worth);
        place(page, worth * WEIGHTS.entry, id, headings.get(`${file}#${id}`) ?? null);
      }
    }
    for (const [title, found] of Object.entries(index.alltitles)) {
      const score = fit(tokens(title), weight, total);
      if (score < 0.2) continue;
      for (const [file, id] of found) {
        const own = index.titles[file] === title;
        const worth = score * (own ? WEIGHTS.title : WEIGHTS.heading);
        best[file].title = Math.max(best[file].title, worth);
        place(best[file], worth, own ? null : id, own ? null : title);
      }
    }
    const known = Object.keys(index.terms);
    for (const [word, heavy] of weight) {
      const inTitle = list(index.titleterms[word]), inText = list(index.terms[word]);
      const exact = new Map([...inText.map((file) => [file, 1]), ...inTitle.map((file) => [file, 1.6])]);
      if (!exact.size && word.length > 2) { // half a word, such as that of an option
        known.filter((term) => term.includes(word)).forEach((term) =>
          list(index.terms[term]).forEach((file) => exact.set(file, 0.5)));
      }
      exact.forEach((share, file) => { best[file].words += share * heavy / total; });
    }
    const results = best.map((page, file) => {
      const name = index.docnames[file];
      const list = LISTS.find(([pattern]) => pattern.test(name))?.[1] ?? 1;
      const score = list * (WEIGHTS.entry * page.entry + page.title + WEIGHTS.word * page.words);
      const title = page.shown ? `${index.titles[file]} > ${page.shown}` : index.titles[file];
      return [name, title, page.at, null, score, index.filenames[file]];
    }).filter((result) => result[4] > 0.25);
    for (const word of said.split(/\s+/).filter((word) => /[_.]/.test(word) || said === word)) {
      for (const found of Search.performObjectSearch(word, new Set([word]))) {
        const name = found[1].toLowerCase();
        results.push([...found.slice(0, 4), WEIGHTS.object * (name === word || name.endsWith(`.${word}`) ? 1 : 0.1), found[5]]);
      }
    }
    // Equal scores in the order of the menu's files, not of their titles. The last is shown first.
    const order = new Map(index.docnames.map((name, i) => [name, name.includes("/_generated/") ? i + pages : i]));
    results.sort((a, b) => b[4] - a[4] || order.get(a[0]) - order.get(b[0]));
    return results.slice(0, 60).reverse();
  };

  const SYMBOLS = { pitheta: "π", piref: "π_ref", piold: "π_old", KL: "KL", E: "E", Var: "Var", beta: "β", theta: "θ", pi: "π",
    rho: "ρ", mid: "|", given: "|", Vert: "‖", "|": "‖", cdot: "·", le: "≤", ge: "≥", leq: "≤", geq: "≥", neq: "≠", to: "→",
    infty: "∞", approx: "≈", nabla: "∇", sum: "Σ", lambda: "λ", epsilon: "ε", varepsilon: "ε", Delta: "Δ", sqrt: "√", times: "×" };
  // A formula as one reads it in a line of text.
  const plain = (formula) => formula
    .replace(/\\(?:text|mathrm|operatorname|mathbf|mathbb)\s*\{([^{}]*)\}/g, "$1")
    .replace(/\\t?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}/g, "$1/$2")
    .replace(/\\([A-Za-z]+|\|)/g, (_, name) => SYMBOLS[name] ?? (/^(?:left|right|big\w*|quad|qquad|,|;)$/i.test(name) ? "" : name))
    .replace(/\\[,;:! ]/g, " ").replace(/\\\\/g, " ").replace(/[{}&]/g, "").replace(/\s+/g, " ").trim();
  const readable = (text) => text.replace(/\\\(([^]*?)\\\)|\\\[([^]*?)\\\]/g, (_, line, display) => plain(line ?? display));

  const excerpt = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const noise = "script, style, nav, button, summary, .headerlink, .highlight, table, .code-of, .eqno";
    const start = (anchor && page.querySelector(`[role="main"] ${anchor}`)) ||
      page.querySelector("article.bd-article") || page.querySelector('[role="main"]') || page.body;
    start.querySelectorAll(noise).forEach((part) => part.remove());
    return readable(start.textContent);
  };

  // This script is loaded before the search, and acts before it begins.
  document.addEventListener("DOMContentLoaded", () => {
    if (typeof Search === "undefined") return;
    Search._performSearch = rank;
    Search.htmlToText = excerpt;
    Search.readable = readable;
    const asked = new URLSearchParams(window.location.search).get("q");
    if (asked && document.getElementById("search-results")) {
      Search.loadIndex(`${document.documentElement.dataset.content_root}searchindex.js`);
    }
  });
})();
