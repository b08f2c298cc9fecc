// On a phone a displayed formula that is wider than its column breaks behind a wide space; a piece that is still
// too wide breaks before its relations, then before its signs. What does not fit then becomes smaller, by a quarter
// at most, and only then scrolls.
globalThis.klFormulas = (() => {
  const LEAST = 0.75;
  // MathJax sets relations apart by space 4 and binary signs by space 3.
  const isRelation = (part) => part.localName === "mjx-mo" && part.getAttribute("space") === "4";
  const isSign = (part) => part.localName === "mjx-mo" && part.getAttribute("space") === "3";
  const isGap = (part) => part?.localName === "mjx-mstyle" && parseFloat(part.firstElementChild?.style.width) >= 0.9;
  const wide = (box) => box.scrollWidth > box.clientWidth + 1;
  const BREAKS = [(part, before) => isGap(before), isRelation, isSign];

  // The parts of a formula that stand side by side: its own, or those of its cells.
  const rows = (math) => {
    const cells = [...math.querySelectorAll("mjx-mtd")].filter((cell) => !cell.querySelector("mjx-mtd"));
    return math.firstElementChild?.localName === "mjx-mtable" && math.children.length === 1 ? cells : [math];
  };

  // Parts become pieces, and those that are too wide smaller ones; a line may end between two of them.
  const cut = (row, room, level = 0) => {
    if (level === BREAKS.length) return;
    const pieces = [];
    row.classList.add("kl-cut");
    [...row.children].forEach((part, i, parts) => {
      if (i === 0 || BREAKS[level](part, parts[i - 1])) {
        pieces.push(document.createElement("span"));
        pieces.at(-1).className = `kl-piece${isSign(part) ? " kl-sign" : ""}`;
        row.append(pieces.at(-1));
      }
      pieces.at(-1).append(part);
    });
    for (const piece of pieces) {
      if (piece.getBoundingClientRect().width > room) cut(piece, room, level + 1);
    }
  };

  const fit = (box) => {
    const math = box.querySelector("mjx-math");
    if (!math || box.dataset.fitted) return;
    box.dataset.fitted = "yes";
    if (!wide(box)) return;
    const all = rows(math), room = box.clientWidth * (all[0] === math ? 1 : 0.8);
    for (const row of all) if (row.getBoundingClientRect().width > room) cut(row, room);
    box.classList.add("kl-broken");
    if (wide(box)) box.style.fontSize = `${Math.max(LEAST, box.clientWidth / box.scrollWidth)}em`;
  };

  return { fit };
})();
