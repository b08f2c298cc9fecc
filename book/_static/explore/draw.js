// Controls and drawings of the explorers: labelled inputs, and SVG that is drawn again at every width.
"use strict";
globalThis.klDraw = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  const html = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children);
    return node;
  };
  const svg = (tag, attributes = {}, ...children) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };

  let ids = 0;
  const fresh = (stem) => `kl-${stem}-${(ids += 1)}`;

  // A number on one line: few digits, rounding errors as zero, an infinity in words.
  const number = (value, digits = 3) => {
    if (value === undefined || Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? local("infinite", "无穷大") : local("−infinite", "负无穷大");
    const size = Math.abs(value);
    if (size < 1e-12) return "0";
    if (size < 1e-3 || size >= 1e5) {
      const [head, power] = value.toExponential(digits - 1).split("e");
      const raised = [...String(Number(power))].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("");
      return Number(head) === 1 ? `10${raised}` : `${head} × 10${raised}`.replace("-", "−");
    }
    return String(Number(value.toPrecision(digits))).replace("-", "−");
  };

  const slider = ({ label, min, max, step, value, shown = number, change }) => {
    const id = fresh("slider");
    const output = html("output", { for: id }, shown(value));
    const input = html("input", { id, type: "range", min, max, step, value, "aria-valuetext": shown(value) });
    const show = (exact) => {
      output.textContent = shown(exact);
      input.setAttribute("aria-valuetext", output.textContent);
    };
    input.addEventListener("input", () => { show(input.valueAsNumber); change(input.valueAsNumber); });
    // The handle stands at a step, what is shown and computed with need not.
    const set = (to) => { input.value = to; show(to); };
    return { node: html("div", { class: `kl-slider${label.length > 1 ? " kl-long" : ""}` }, html("label", { for: id }, label), input, output), input, set };
  };

  const choice = ({ label, options, value, change }) => {
    const id = fresh("choice");
    const input = html("select", { id });
    const fill = (entries, chosen) => input.replaceChildren(...entries.map(([key, text, disabled]) =>
      html("option", { value: key, selected: key === chosen, disabled }, text)));
    fill(options, value);
    input.addEventListener("change", () => change(input.value));
    return { node: html("div", { class: "kl-choice" }, html("label", { for: id }, label), input), input, fill };
  };

  const check = ({ label, value, change, swatch }) => {
    const id = fresh("check");
    const input = html("input", { id, type: "checkbox" });
    input.checked = value;
    input.addEventListener("change", () => change(input.checked));
    const text = html("label", { for: id });
    if (swatch) text.append(html("span", { class: "kl-swatch", style: `background:${swatch}` }));
    text.append(label);
    return { node: html("div", { class: "kl-check" }, input, text), input };
  };

  const button = (label, press) => {
    const node = html("button", { type: "button", class: "kl-button" }, label);
    node.addEventListener("click", press);
    return node;
  };

  const group = (legend, ...nodes) => html("fieldset", {}, html("legend", {}, legend), ...nodes);

  const table = (caption, head, rows) => html("div", { class: "kl-numbers", role: "region", "aria-label": caption, tabindex: 0 }, html("table", {},
    html("caption", {}, caption),
    html("thead", {}, html("tr", {}, ...head.map((text) => html("th", { scope: "col" }, text)))),
    html("tbody", {}, ...rows.map(([name, ...cells]) => html("tr", {},
      html("th", { scope: "row" }, name), ...cells.map((cell) => html("td", {}, cell)))))));

  // A drawing that fills its column: `paint(picture, width, height)` runs again whenever that changes.
  const picture = ({ label, height, paint }) => {
    const root = svg("svg", { role: "img", "aria-label": label });
    const node = html("div", { class: "kl-picture" }, root);
    const draw = () => {
      const width = node.clientWidth;
      if (width === 0) return;
      const tall = typeof height === "function" ? height(width) : height;
      root.setAttribute("viewBox", `0 0 ${width} ${tall}`);
      root.setAttribute("height", tall);
      root.replaceChildren();
      paint(root, width, tall);
    };
    new ResizeObserver(draw).observe(node);
    const say = (text) => root.setAttribute("aria-label", text);
    return { node, root, draw, say };
  };

  const ticks = (low, high, count) => {
    const raw = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9 * step; at += step) found.push(Number(at.toPrecision(12)));
    return found;
  };
  const powers = (low, high, count) => {
    const every = Math.max(1, Math.ceil((Math.log10(high) - Math.log10(low)) / count));
    const found = [];
    for (let k = Math.ceil(Math.log10(low) - 1e-9); k <= Math.log10(high) + 1e-9; k += every) found.push(10 ** k);
    return found;
  };

  // Axes of a panel, and the two maps from numbers to pixels.
  const panel = (root, { width, height, x, y, xLabel, yLabel, left = 48, right = 10, logX = false, logY = false, yTicks }) => {
    const box = { left, right: width - right, top: yLabel ? 22 : 12, bottom: height - 38 };
    const map = ([low, high], log, from, to) => {
      const of = log ? Math.log : (value) => value;
      return (value) => from + ((of(value) - of(low)) / (of(high) - of(low))) * (to - from);
    };
    const toX = map(x, logX, box.left, box.right), toY = map(y, logY, box.bottom, box.top);
    const axis = svg("g", { class: "kl-axis" });
    for (const at of logX ? powers(...x, width / 70) : ticks(...x, width / 90)) {
      axis.append(svg("line", { x1: toX(at), x2: toX(at), y1: box.top, y2: box.bottom }),
        svg("text", { x: toX(at), y: box.bottom + 15, "text-anchor": "middle" }, number(at)));
    }
    for (const at of yTicks ?? (logY ? powers(...y, 4) : ticks(...y, 4))) {
      axis.append(svg("line", { x1: box.left, x2: box.right, y1: toY(at), y2: toY(at) }),
        svg("text", { x: box.left - 6, y: toY(at) + 4, "text-anchor": "end" }, number(at)));
    }
    axis.append(svg("text", { class: "kl-label", x: (box.left + box.right) / 2, y: height - 5, "text-anchor": "middle" }, xLabel));
    if (yLabel) axis.append(svg("text", { class: "kl-label", x: 2, y: 9 }, yLabel));
    root.append(axis);
    return { toX, toY, box };
  };

  const path = (points) => {
    let moved = true;
    return points.map(([x, y]) => {
      if (!Number.isFinite(x) || !Number.isFinite(y)) { moved = true; return ""; }
      const command = `${moved ? "M" : "L"}${x.toFixed(2)} ${y.toFixed(2)}`;
      moved = false;
      return command;
    }).join("");
  };
  const line = (root, points, attributes) => root.append(svg("path", { d: path(points), fill: "none", ...attributes }));

  const arrow = (root, [x1, y1], [x2, y2], attributes) => {
    const length = Math.hypot(x2 - x1, y2 - y1);
    if (!(length > 0.5)) {
      root.append(svg("circle", { cx: x1, cy: y1, r: 2.5, fill: attributes.stroke }));
      return;
    }
    const head = Math.min(9, 3 + length / 3), ux = (x2 - x1) / length, uy = (y2 - y1) / length;
    const [bx, by] = [x2 - head * ux, y2 - head * uy];
    root.append(svg("line", { x1, y1, x2: bx, y2: by, "stroke-width": 3, ...attributes }),
      svg("path", {
        d: `M${x2} ${y2}L${bx - 0.5 * head * uy} ${by + 0.5 * head * ux}L${bx + 0.5 * head * uy} ${by - 0.5 * head * ux}Z`,
        fill: attributes.stroke,
      }));
  };

  // Drag a mark of a picture; `moved(x, y)` is told where, in the picture's pixels.
  const draggable = (mark, root, moved) => {
    mark.classList.add("kl-handle");
    mark.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      const follow = (at) => {
        const box = root.getBoundingClientRect();
        moved(at.clientX - box.left, at.clientY - box.top);
      };
      const end = () => {
        window.removeEventListener("pointermove", follow);
        window.removeEventListener("pointerup", end);
        window.removeEventListener("pointercancel", end);
      };
      window.addEventListener("pointermove", follow);
      window.addEventListener("pointerup", end);
      window.addEventListener("pointercancel", end);
    });
  };

  // The text of the page's language.
  const local = (english, chinese) => (document.documentElement.lang.startsWith("zh") ? chinese : english);

  const calm = () => window.matchMedia("(prefers-reduced-motion: reduce)").matches;

  // What happens where a page has `<div data-explore="name">`.
  const explorer = (name, build) => document.addEventListener("DOMContentLoaded", () => {
    for (const place of document.querySelectorAll(`[data-explore="${name}"]`)) {
      place.replaceChildren();
      build(place);
    }
  });

  return {
    html, svg, number, slider, choice, check, button, group, table, picture, panel, line, arrow, draggable, local, calm, explorer,
  };
})();
