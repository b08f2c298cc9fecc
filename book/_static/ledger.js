// Filters of the ledger: one button a source, a kind and a verdict; a claim shows when it fits all three.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.querySelector(".ledger-filters");
  const claims = [...document.querySelectorAll(".claim")];
  if (!place || claims.length === 0) return;
  const axes = {
    source: ["source-a", "source-b", "source-c", "source-d", "source-e"],
    kind: ["definition", "theorem", "numeric", "empirical", "method"],
    verdict: ["holds", "holds-if", "fails", "open"],
  };
  const chosen = { source: null, kind: null, verdict: null };
  const shown = document.createElement("p");
  shown.setAttribute("aria-live", "polite");
  const fits = (claim, axis) =>
    chosen[axis] === null || claim.classList.contains("claim-" + chosen[axis]);
  const update = () => {
    let count = 0;
    for (const claim of claims) {
      const visible = Object.keys(axes).every((axis) => fits(claim, axis));
      claim.hidden = !visible;
      count += visible;
    }
    shown.textContent = `${count} of ${claims.length} claims`;
  };
  place.textContent = "";
  for (const [axis, values] of Object.entries(axes)) {
    const row = document.createElement("div");
    row.className = "ledger-axis";
    row.setAttribute("role", "group");
    row.setAttribute("aria-label", `filter by ${axis}`);
    for (const value of values) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = value.replace("-", " ").replace(/^source (.)/, (_, key) => `source ${key.toUpperCase()}`);
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        chosen[axis] = chosen[axis] === value ? null : value;
        for (const other of row.children) {
          other.setAttribute("aria-pressed", String(other === button && chosen[axis] !== null));
        }
        update();
      });
      row.append(button);
    }
    place.append(row);
  }
  place.append(shown);
  update();
});
