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
  const CHINESE = {
    source: "资料", kind: "种类", verdict: "结论", definition: "定义", theorem: "定理", numeric: "数字", empirical: "经验",
    method: "方法", holds: "成立", "holds if": "有条件成立", fails: "不成立", open: "未决",
  };
  const chinese = document.documentElement.lang.startsWith("zh");
  const say = (text) => (chinese && CHINESE[text]) || text;
  const named = (value) => (value.startsWith("source-") ? `${say("source")} ${value.slice(-1).toUpperCase()}` : say(value.replace("-", " ")));
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
    shown.textContent = chinese ? `${claims.length} 条论断中的 ${count} 条` : `${count} of ${claims.length} claims`;
  };
  place.textContent = "";
  for (const [axis, values] of Object.entries(axes)) {
    const row = document.createElement("div");
    row.className = "ledger-axis";
    row.setAttribute("role", "group");
    row.setAttribute("aria-label", chinese ? `按${say(axis)}筛选` : `filter by ${axis}`);
    for (const value of values) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = named(value);
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
