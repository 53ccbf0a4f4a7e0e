"use strict";
const log = JSON.parse(document.getElementById("log").textContent);
const canvas = document.querySelector("canvas"), tip = document.getElementById("tip");
const pen = canvas.getContext("2d");
const LANE = 26, GAP = 30, AXIS = 26;
let LEFT = 150, color = {};

// The page's colours follow the system's; the canvas asks for them each time.
function measure() {
  const narrow = canvas.clientWidth < 560;
  pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  let widest = 0;
  for (const row of log.rows) for (const lane of row.lanes) {
    // On a phone a lane has its kind for a name, without the place.
    lane.label = narrow ? lane.name.split(" (")[0] : lane.name;
    widest = Math.max(widest, pen.measureText(lane.label).width);
  }
  LEFT = Math.min(widest + 20, narrow ? 110 : 320);
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "faint", "line"]) color[name] = style.getPropertyValue("--" + name);
}

// Transfers overlap: each goes to the first level of its lane that is free.
for (const row of log.rows) for (const lane of row.lanes) {
  const free = [];
  lane.spans.sort((a, b) => a.start - b.start);
  for (const span of lane.spans) {
    let level = free.findIndex(stop => stop <= span.start);
    if (level < 0) level = free.length;
    free[level] = span.stop;
    span.level = level;
  }
  lane.levels = Math.max(1, free.length);
}
let top_ = GAP;
for (const row of log.rows) {
  row.top = top_;
  top_ += row.lanes.length * LANE + GAP;
}
const height = top_ + AXIS - 8;
let from = log.whole[0], to = log.whole[1];

const scale = () => (canvas.clientWidth - LEFT - 10) / (to - from);
const x = time => LEFT + (time - from) * scale();
function zoom(factor, at) { show(at - (at - from) * factor, at + (to - at) * factor); }
function show(start, stop) { from = start; to = stop; draw(); }

function ticks() {
  const rough = (to - from) / Math.max(2, canvas.clientWidth / 120), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(f => f * power >= rough);
  const out = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) out.push(i * step);
  const small = step < 0.05;
  const digits = Math.max(0, -Math.floor(Math.log10(step * (small ? 1000 : 1))));
  return out.map(t => [t, small ? (t * 1000).toFixed(digits) + " ms" : t.toFixed(digits) + " s"]);
}

function place(row, number, span) {
  const lane = row.lanes[number], tall = (LANE - 5) / lane.levels;
  const left = x(span.start);
  return [left, row.top + number * LANE + span.level * tall,
          Math.max(0.6, x(span.stop) - left), Math.max(0.8, tall - 0.4)];
}

function draw() {
  measure();
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  for (const [time, text] of ticks()) {
    pen.fillStyle = color.line;
    pen.fillRect(x(time), 8, 1, height - AXIS - 8);
    pen.fillStyle = color.faint;
    pen.fillText(text, x(time), height - AXIS / 2);
  }
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, width - LEFT - 10, height);
  pen.clip();
  for (const row of log.rows) row.lanes.forEach((lane, number) => {
    for (const span of lane.spans) {
      if (span.stop < from || span.start > to) continue;
      const box = place(row, number, span);
      pen.fillStyle = log.colors[span.name];
      pen.fillRect(...box);
      const ink = log.inks[span.name];
      const left = Math.max(box[0], LEFT), right = Math.min(box[0] + box[2], width - 10);
      if (ink && right - left > 62) {
        pen.fillStyle = ink;
        pen.fillText(span.name, (left + right) / 2, box[1] + box[3] / 2);
      }
    }
  });
  pen.restore();
  for (const row of log.rows) {
    pen.textAlign = "left";
    pen.fillStyle = color.ink;
    pen.font = "600 13px system-ui, 'DejaVu Sans', sans-serif";
    pen.fillText(row.title, 12, row.top - 13);
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    pen.textAlign = "right";
    row.lanes.forEach((lane, i) => pen.fillText(lane.label, LEFT - 10, row.top + i * LANE + LANE / 2 - 2));
  }
}

function find(px, py) {
  for (const row of log.rows) for (let i = 0; i < row.lanes.length; i++)
    for (const span of row.lanes[i].spans) {
      const [left, top, wide, tall] = place(row, i, span);
      if (px >= left - 1 && px <= left + wide + 1 && py >= top && py <= top + tall) return span;
    }
}

function describe(span) {
  const seconds = span.stop - span.start;
  const time = seconds < 0.1 ? (seconds * 1000).toFixed(2) + " ms" : seconds.toFixed(3) + " s";
  const parts = [span.name, time];
  if (span.chunk >= 0) parts.push("chunk " + span.chunk);
  if (span.nbytes > 0) {
    parts.push((span.nbytes / 1048576).toFixed(1) + " MiB");
    parts.push((span.nbytes / 1e9 / seconds).toFixed(2) + " GB/s");
  }
  return parts.join(" \u00b7 ");
}

let held = null;
canvas.addEventListener("pointerdown", event => {
  held = event.offsetX;
  canvas.setPointerCapture(event.pointerId);
  canvas.style.cursor = "grabbing";
});
canvas.addEventListener("pointerup", () => { held = null; canvas.style.cursor = "grab"; });
canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
canvas.addEventListener("pointermove", event => {
  if (held !== null) {
    const moved = (held - event.offsetX) / scale();
    held = event.offsetX;
    tip.style.display = "none";
    return show(from + moved, to + moved);
  }
  const span = event.offsetX > LEFT ? find(event.offsetX, event.offsetY) : undefined;
  tip.style.display = span ? "block" : "none";
  if (!span) return;
  tip.textContent = describe(span);
  tip.style.left = Math.min(event.offsetX + 14, canvas.clientWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = event.offsetY + 16 + "px";
});
canvas.addEventListener("wheel", event => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  const factor = 1.0015 ** event.deltaY, at = from + (event.offsetX - LEFT) / scale();
  zoom(factor, at);
}, { passive: false });

const bar = document.getElementById("bar");
function add(name, act) {
  const button = document.createElement("button");
  button.textContent = name;
  button.onclick = act;
  bar.append(button);
}
for (const [name, start, stop] of log.views) add(name, () => show(start, stop));
add("+", () => zoom(0.5, (from + to) / 2));
add("\u2212", () => zoom(2, (from + to) / 2));
for (const [name, color] of Object.entries(log.colors)) {
  const key = document.createElement("span"), patch = document.createElement("i");
  key.className = "key";
  patch.style.background = color;
  key.append(patch, name);
  bar.append(key);
}
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
