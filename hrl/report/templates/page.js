"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  let { charts, any, runs, live } = JSON.parse(byId("payload").textContent);
  let smoothing = 0;
  let span = null; // [first, last] step in sight; null for all
  let cursor = null; // the marked step
  const views = new Map(); // name of a chart -> its Vega view

  // ------------------------------------------------------------------ numbers

  const extent = () => {
    const ran = runs.filter((run) => run.steps.length);
    if (!ran.length) return [0, 1];
    return [Math.min(...ran.map((run) => run.steps[0])), Math.max(...ran.map((run) => run.steps.at(-1)))];
  };

  /** Exponential moving average that is not pulled to 0 at its beginning. */
  function smoothed(values) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null || Number.isNaN(value) || smoothing === 0) return value;
      sum = smoothing * sum + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return sum / weight;
    });
  }

  /** One row per step, with the fields that the chart's specification names. */
  function rowsOf(chart) {
    const rows = new Map();
    const row = (step, every) => rows.get(step) ?? rows.set(step, blank(step, every)).get(step);
    const blank = (step, every) => {
      const fields = { step, every };
      chart.lines.forEach((_, n) => { fields[`r${n}`] = fields[`s${n}`] = null; });
      return fields;
    };
    chart.lines.forEach((line, n) => {
      const { steps, values, every } = runs[line.run];
      const raw = (values[line.metric] ?? []).map((value) => (value === "NaN" ? NaN : value));
      const smooth = chart.stack ? raw : smoothed(raw);
      raw.forEach((value, at) => {
        if (value === null) return;
        Object.assign(row(steps[at], every), { [`r${n}`]: value, [`s${n}`]: smooth[at] });
      });
    });
    return [...rows.values()].sort((a, b) => a.step - b.step);
  }

  function signalsOf(chart, rows) {
    const [first, last] = span ?? extent();
    const seen = rows.filter((row) => row.step >= first && row.step <= last);
    const dots = chart.stack ? [] : chart.lines.map((_, n) => {
      const count = seen.filter((row) => row[`r${n}`] !== null).length;
      return [`dot${n}`, count <= 60 ? 18 : 0];
    });
    return { first, last, cursor: cursor ?? -1, ...Object.fromEntries(dots) };
  }

  // ------------------------------------------------------------------ charts

  const plotOf = (chart) => document.querySelector(`[data-chart="${chart.name}"] .plot`);

  async function draw(chart) {
    const plot = plotOf(chart);
    if (!plot) return;
    const rows = rowsOf(chart);
    const signals = signalsOf(chart, rows);
    const spec = structuredClone(chart.spec);
    spec.data.values = rows;
    spec.params = Object.entries(signals).map(([name, value]) => ({ name, value }));
    views.get(chart.name)?.view.finalize();
    const { view } = await vegaEmbed(plot, spec, { ast: true, actions: false, renderer: "svg", tooltip: false });
    views.set(chart.name, { view, chart, rows });
    plot.dataset.drawn = "yes";
  }

  function refresh() {
    for (const shown of views.values()) {
      shown.rows = rowsOf(shown.chart);
      const signals = signalsOf(shown.chart, shown.rows);
      for (const [name, value] of Object.entries(signals)) shown.view.signal(name, value);
      shown.view.data("points", shown.rows).runAsync();
    }
  }

  async function drawAll() {
    for (const chart of charts) await draw(chart);
    await drawAny();
    document.documentElement.dataset.drawn = "yes";
  }

  // ------------------------------------------------------------------ any metric

  async function drawAny() {
    const select = byId("any-metric");
    if (!select) return;
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.values)))].sort();
    select.closest("[data-chart]").hidden = names.length === 0;
    if (names.length === 0) return;
    if (names.join() !== [...select.options].map((option) => option.value).join()) {
      const before = select.value || ["reward/mean", "train/loss"].find((name) => names.includes(name));
      select.replaceChildren(...names.map((name) => new Option(name, name)));
      select.value = names.includes(before) ? before : names[0];
    }
    const lines = any.lines.map((line) => ({ ...line, metric: select.value }));
    await draw({ ...any, lines });
  }

  // ------------------------------------------------------------------ the marked step

  const tooltip = byId("tooltip");
  const number = (value) => (Number.isNaN(value) ? "not finite" : Number(value.toPrecision(4)).toString());

  function mark(step, shown, box) {
    cursor = step;
    for (const { view } of views.values()) view.signal("cursor", step ?? -1).runAsync();
    const row = step === null ? null : shown.rows.find((each) => each.step === step);
    tooltip.hidden = !row;
    if (!row) return;
    const head = document.createElement("b");
    head.textContent = row.every > 1 ? `steps ${step - row.every + 1} to ${step}` : `step ${step}`;
    const list = document.createElement("dl");
    shown.chart.lines.forEach((line, n) => {
      if (row[`r${n}`] === null) return;
      const name = document.createElement("dt"), value = document.createElement("dd");
      name.textContent = line.label;
      name.className = line.colour;
      value.textContent = number(row[`r${n}`]);
      list.append(name, value);
    });
    tooltip.replaceChildren(head, list);
    const { width, height } = tooltip.getBoundingClientRect();
    const left = Math.max(4, Math.min(box.x + 14, innerWidth - width - 8));
    const top = box.y + 14 + height > innerHeight ? box.y - height - 14 : box.y + 14;
    tooltip.style.transform = `translate(${left}px, ${Math.max(4, top)}px)`;
  }

  const shownIn = (plot) => views.get(plot.closest("[data-chart]").dataset.chart);

  function nearest(rows, step) {
    const [first, last] = span ?? extent();
    const steps = rows.map((row) => row.step).filter((each) => each >= first && each <= last);
    return steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), steps[0] ?? null);
  }

  document.addEventListener("pointermove", (event) => {
    const plot = event.target.closest?.(".plot");
    const shown = plot && shownIn(plot);
    if (!shown) return cursor !== null && !document.activeElement?.matches(".plot") ? mark(null) : undefined;
    const left = plot.querySelector("svg").getBoundingClientRect().left + shown.view.origin()[0];
    mark(nearest(shown.rows, shown.view.scale("x").invert(event.clientX - left)), shown, { x: event.clientX, y: event.clientY });
  });
  document.addEventListener("keydown", (event) => {
    const plot = event.target.closest?.(".plot");
    const shown = plot && shownIn(plot);
    if (!shown) return;
    if (event.key === "Escape") return mark(null);
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const steps = shown.rows.map((row) => row.step);
    const at = cursor === null ? (move > 0 ? 0 : steps.length - 1) : steps.indexOf(nearest(shown.rows, cursor)) + move;
    const step = steps[Math.max(0, Math.min(steps.length - 1, at))];
    const box = plot.getBoundingClientRect();
    mark(step, shown, { x: box.left + shown.view.origin()[0] + shown.view.scale("x")(step), y: box.top + 20 });
  });
  document.addEventListener("focusout", (event) => event.target.matches?.(".plot") && mark(null));

  // ------------------------------------------------------------------ controls

  const controls = byId("controls");
  controls?.addEventListener("input", (event) => {
    smoothing = Number(byId("smoothing").value);
    byId("smoothing-value").textContent = smoothing ? smoothing.toFixed(2) : "off";
    const [first, last] = extent();
    const asked = ["from", "to"].map((id) => (byId(id).value === "" ? null : Number(byId(id).value)));
    span = asked.every((each) => each === null) ? null : [asked[0] ?? first, Math.max(asked[1] ?? last, asked[0] ?? first)];
    refresh();
  });
  document.addEventListener("input", (event) => event.target.id === "any-metric" && drawAny());

  const theme = byId("theme");
  const remembered = (() => { try { return localStorage.getItem("hrl-theme"); } catch { return null; } })();
  const paint = (name) => { document.documentElement.dataset.theme = name; theme.value = name; };
  paint(["light", "dark"].includes(remembered) ? remembered : "auto");
  theme.addEventListener("input", () => {
    paint(theme.value);
    try { localStorage.setItem("hrl-theme", theme.value); } catch { /* a file's page may have no storage */ }
  });

  // ------------------------------------------------------------------ a run that goes on

  const inUse = (element) => element.contains(document.activeElement) ||
    (!getSelection().isCollapsed && getSelection().containsNode(element, true));

  const waiting = new Map(); // section -> what came for it while its reader was at it

  /** Replace what changed of a section, and leave its open details open. */
  function replaceSection(section, html) {
    waiting.delete(section);
    if (section.dataset.html === html) return;
    if (inUse(section)) {
      waiting.set(section, html);
      return;
    }
    const open = new Set([...section.querySelectorAll("details[open]")].map((each) => each.id));
    section.innerHTML = html; // made by the same template as the page: all text in it is escaped
    section.dataset.html = html;
    for (const each of section.querySelectorAll("details")) if (open.has(each.id)) each.open = true;
  }

  async function show(answer) {
    ({ charts, any, runs } = answer);
    for (const [name, html] of Object.entries(answer.sections)) {
      const section = byId(name);
      if (name === "curves") continue;
      if (section) replaceSection(section, html);
    }
    const fresh = document.createElement("template");
    fresh.innerHTML = answer.sections.curves;
    const shape = (root) => [...root.querySelectorAll("[data-chart], .every, .about")]
      .map((each) => each.dataset.chart ?? each.textContent).join();
    const curves = byId("curves");
    const redraw = shape(fresh.content) !== shape(curves) ||
      charts.some((chart) => JSON.stringify(views.get(chart.name)?.chart.lines) !== JSON.stringify(chart.lines));
    if (redraw) {
      curves.replaceChildren(fresh.content);
      await drawAll();
      return;
    }
    for (const legend of fresh.content.querySelectorAll(".legend")) {
      const name = legend.closest("[data-chart]").dataset.chart;
      curves.querySelector(`[data-chart="${name}"] .legend`)?.replaceWith(legend);
    }
    for (const chart of charts) views.get(chart.name).chart = chart;
    refresh();
  }

  let version = null;
  let over = false;

  /** Show what is new, and say how the server answered. */
  async function ask() {
    const answer = await fetch("data", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
    if (answer.status === 200) {
      const fresh = await answer.json();
      await show(fresh);
      version = answer.headers.get("ETag");
      over = !fresh.running;
    }
    if (over) return "The run has ended; this is how it was left.";
    return answer.ok || answer.status === 304 ? "Follows the run." :
      "The run's folder can't be read; this is how it was before. Trying again.";
  }

  async function poll() {
    if (!document.hidden && !over) {
      byId("live").textContent = await ask().catch(() => "No answer from hrl; trying again.");
    }
    for (const [section, html] of [...waiting]) replaceSection(section, html);
    if (!over || waiting.size) setTimeout(poll, 2000);
  }

  drawAll().then(() => { if (live) poll(); });
})();
