// Used, shared, cached and wasted pages over all frames, with a cursor at the current one.

const CURVES = [
  ["used", "used", []],
  ["shared", "shared-3-fill", []],
  ["cached", "cached-fill", [6, 4]],
  ["wasted", "wasted", [2, 3]],
];

class Curves {
  constructor(canvas, log, onPick) {
    this.canvas = canvas;
    this.log = log;
    this.plot = document.createElement("canvas");
    const pick = (event) => {
      const box = canvas.getBoundingClientRect();
      const part = (event.clientX - box.left - this.left) / Math.max(1, this.right - this.left);
      onPick(Math.round(Math.min(1, Math.max(0, part)) * (this.log.numFrames - 1)));
    };
    canvas.onpointerdown = (event) => { canvas.setPointerCapture(event.pointerId); pick(event); };
    canvas.onpointermove = (event) => { if (event.buttons & 1) pick(event); };
  }

  x(frame) { return this.left + (this.log.numFrames > 1 ? frame / (this.log.numFrames - 1) : 0) * (this.right - this.left); }

  y(pages) { return this.bottom - (pages / this.top) * (this.bottom - this.head); }

  layout() {
    const { log } = this, width = this.canvas.parentElement.clientWidth, height = 190;
    this.width = width;
    this.height = height;
    this.left = 44; this.right = width - 12; this.head = 10; this.bottom = height - 34;
    this.top = Math.max(1, log.numPages - 1);
    this.context = fitCanvas(this.canvas, width, height);
    const plot = fitCanvas(this.plot, width, height), colours = readColours();
    plot.font = `11px ${css("--figures")}`;
    plot.textBaseline = "middle";
    plot.textAlign = "right";
    for (let i = 0; i <= 4; i++) {
      const y = Math.round(this.y((this.top * i) / 4)) + 0.5;
      plot.strokeStyle = colours.line;
      plot.beginPath();
      plot.moveTo(this.left, y);
      plot.lineTo(this.right, y);
      plot.stroke();
      plot.fillStyle = colours.muted;
      if (i % 2 === 0) plot.fillText(String(Math.round((this.top * i) / 4)), this.left - 8, y);
    }
    plot.textAlign = "center";
    // step numbers at round distances, about one per 110 pixels
    const wanted = Math.max(1, log.numSteps / Math.max(1, width / 110)), power = 10 ** Math.floor(Math.log10(wanted));
    const every = Math.max(1, power * [1, 2, 5, 10].find((factor) => factor * power >= wanted));
    for (let frame = 0; frame < log.numSteps; frame += every) plot.fillText(log.stepName(frame), this.x(frame), this.bottom + 24);
    for (const [name, colour, dash] of CURVES) this.curve(plot, log.series[name], css(`--${colour}`), dash, name === "used");
    // preemptions, as ticks under the axis
    plot.fillStyle = colours.wasted;
    let last = -9;
    for (let frame = 0; frame < log.numFrames; frame++) {
      const x = Math.round(this.x(frame));
      if (!log.series.preempted[frame] || x - last < 2) continue;
      plot.beginPath();
      plot.moveTo(x, this.bottom + 4);
      plot.lineTo(x - 3.5, this.bottom + 11);
      plot.lineTo(x + 3.5, this.bottom + 11);
      plot.fill();
      last = x;
    }
  }

  // One line; where several frames fall on one pixel, their lowest and highest value.
  curve(plot, values, colour, dash, filled) {
    const count = values.length, path = new Path2D(), perPixel = count / (this.right - this.left);
    const stride = Math.max(1, Math.floor(perPixel));
    for (let start = 0; start < count; start += stride) {
      let low = Infinity, high = -Infinity;
      for (let i = start; i < Math.min(count, start + stride); i++) { low = Math.min(low, values[i]); high = Math.max(high, values[i]); }
      const x = this.x(start);
      if (!start) path.moveTo(x, this.y(high)); else path.lineTo(x, this.y(high));
      if (low !== high) path.lineTo(x, this.y(low));
    }
    plot.setLineDash(dash);
    plot.lineWidth = 1.8;
    plot.lineJoin = "round";
    plot.strokeStyle = colour;
    plot.stroke(path);
    plot.setLineDash([]);
    if (filled) {
      path.lineTo(this.x(count - 1), this.bottom);
      path.lineTo(this.left, this.bottom);
      plot.globalAlpha = 0.1;
      plot.fillStyle = colour;
      plot.fill(path);
      plot.globalAlpha = 1;
    }
  }

  draw(frame) {
    const { context } = this, x = Math.round(this.x(frame)) + 0.5;
    context.clearRect(0, 0, this.width, this.height);
    context.drawImage(this.plot, 0, 0, this.width, this.height);
    context.strokeStyle = css("--ink");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, this.head - 6);
    context.lineTo(x, this.bottom + 12);
    context.stroke();
    for (const [name, colour] of CURVES) {
      context.beginPath();
      context.arc(x, this.y(this.log.series[name][frame]), 4, 0, 7);
      context.fillStyle = css(`--${colour}`);
      context.fill();
      context.strokeStyle = css("--surface");
      context.lineWidth = 1.5;
      context.stroke();
    }
  }
}
