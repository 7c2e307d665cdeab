// Draw the plots that tracestore.pages.plots describes, with BokehJS. tracestore.drawPlots(root) draws
// those of content that arrives later. A plot is drawn when it comes near the screen, or when the browser is idle.
"use strict";
(() => {
  const COLORS = 7;
  const FONT = "system-ui, sans-serif";
  const make = (tag, values = {}) => Object.assign(document.createElement(tag), values);
  const theme = (element = document.documentElement) => {
    const style = getComputedStyle(element);
    return (name) => style.getPropertyValue(`--${name}`).trim();
  };
  // BokehJS reads a text between these delimiters as a formula, and would load MathJax.
  const shorten = (text, length) => (text.length > length ? text.slice(0, length - 1) + "…" : text);
  const plain = (text) => String(text).replace(/\$(?=\$)|\\(?=[()[\]])/g, "$&\u200b");
  const format = (value) => (value === null ? "" : Number(value.toPrecision(5)).toString());

  function colorOf(series, legend) {
    if (!legend.has(series.name)) legend.set(series.name, { position: legend.size, items: [] });
    const color = series.color ?? legend.get(series.name).position;
    return typeof color === "number" ? `series-${color % COLORS}` : color;
  }

  function makeFigure(spec, css, width) {
    const { Plotting, Range1d, BasicTicker, FixedTicker } = Bokeh;
    const across = spec.horizontal ? spec.y : spec.x;
    const up = spec.horizontal ? spec.x : spec.y;
    const names = spec.x.names;
    const range = (axis, isNames) => {
      if (isNames) return spec.horizontal ? new Range1d({ start: names.length - 0.4, end: -0.6 }) : new Range1d({ start: -0.6, end: names.length - 0.4 });
      return axis.range ? new Range1d({ start: axis.range[0], end: axis.range[1] }) : undefined;
    };
    const ranges = {};
    const xRange = range(across, names && !spec.horizontal);
    const yRange = range(up, names && spec.horizontal);
    if (xRange) ranges.x_range = xRange;
    if (yRange) ranges.y_range = yRange;
    const figure = Plotting.figure({
      ...ranges, height: spec.height, sizing_mode: "stretch_width", toolbar_location: null, tools: "",
      background_fill_color: css("background"), border_fill_color: css("background"), outline_line_color: css("border"), min_border: 8,
      x_axis_label: plain(across.label), y_axis_label: plain(up.label),
    });
    for (const axis of [...figure.xaxes, ...figure.yaxes]) {
      axis.axis_label_text_color = axis.major_label_text_color = css("text");
      axis.axis_label_text_font = axis.major_label_text_font = FONT;
      axis.axis_label_text_font_style = "normal";
      axis.axis_line_color = axis.major_tick_line_color = css("muted");
      axis.minor_tick_line_color = null;
    }
    for (const item of figure.center)
      if ("grid_line_color" in item) item.setv({ grid_line_color: css("border"), grid_line_alpha: 0.5 });
    const longest = width < 450 ? 12 : 24;
    for (const [axis, wanted] of [[figure.xaxes[0], across], [figure.yaxes[0], up]]) {
      if (wanted.integer) axis.ticker = new BasicTicker({ min_interval: 1, num_minor_ticks: 0 });
      if (!wanted.names) continue;
      if (!wanted.integer) axis.ticker = new FixedTicker({ ticks: wanted.names.map((_, k) => k) });
      axis.major_label_overrides = new Map(wanted.names.map((name, k) => [k, plain(shorten(name, longest))]));
      if (axis === figure.xaxes[0] && wanted.names.length > 6) axis.major_label_orientation = 0.7;
    }
    return figure;
  }

  function addSeries(figure, series, color, spec) {
    const swap = spec.horizontal;
    const at = (x, y) => (swap ? { x: y, y: x } : { x, y });
    const source = new Bokeh.ColumnDataSource({
      data: {
        p: series.x.map((v) => v ?? NaN), v: series.y.map((v) => v ?? NaN), name: series.x.map(() => series.name),
        place: series.x.map((x, k) => (spec.x.names ? spec.x.names[x] ?? "" : series.kind === "bins" ? `${format(x)} to ${format(series.right[k])}` : format(x))),
        value: series.y.map((y, k) => (series.low ? `${format(y)} (${format(series.low[k])} to ${format(series.high[k])})` : format(y))),
        ...(series.texts && { text: series.texts }), ...(series.low && { low: series.low, high: series.high }),
        ...(series.sizes && { size: series.sizes }), ...(series.right && { right: series.right }),
      },
    });
    const field = (name) => ({ field: name });
    const line = { line_color: color, line_width: 2, line_dash: series.dashed ? "dashed" : "solid" };
    const renderers = [];
    const hovered = [];
    if (series.kind === "line" || series.kind === "step") {
      if (series.low)
        renderers.push(swap
          ? figure.harea({ y: field("p"), x1: field("low"), x2: field("high"), source, fill_color: color, fill_alpha: 0.18 })
          : figure.varea({ x: field("p"), y1: field("low"), y2: field("high"), source, fill_color: color, fill_alpha: 0.18 }));
      const draw = series.kind === "step" ? (a) => figure.step({ ...a, mode: "before" }) : (a) => figure.line(a);
      hovered.push(draw({ ...at(field("p"), field("v")), source, ...line }));
      if (series.marks) renderers.push(figure.scatter({ ...at(field("p"), field("v")), source, size: 5, fill_color: color, line_color: color }));
    } else if (series.kind === "points") {
      hovered.push(figure.scatter({ ...at(field("p"), field("v")), source, size: series.sizes ? field("size") : 8, fill_color: color, fill_alpha: 0.7, line_color: color }));
    } else if (series.kind === "bars") {
      const width = 0.8 / (spec.barCount || 1);
      const shift = (series.barNumber - ((spec.barCount || 1) - 1) / 2) * width;
      source.data.p = source.data.p.map((v) => v + shift);
      hovered.push(swap
        ? figure.hbar({ y: field("p"), right: field("v"), height: width * 0.95, source, fill_color: color, line_color: null })
        : figure.vbar({ x: field("p"), top: field("v"), width: width * 0.95, source, fill_color: color, line_color: null }));
    } else {
      hovered.push(figure.quad({ left: field("p"), right: field("right"), bottom: 0, top: field("v"), source, fill_color: color, fill_alpha: 0.45, line_color: color }));
    }
    if (series.low && (series.kind === "points" || series.kind === "bars"))
      renderers.push(swap
        ? figure.segment({ y0: field("p"), y1: field("p"), x0: field("low"), x1: field("high"), source, line_color: color, line_width: 2 })
        : figure.segment({ x0: field("p"), x1: field("p"), y0: field("low"), y1: field("high"), source, line_color: color, line_width: 2 }));
    // Values of columns are text in tooltips; the names on the left are fixed.
    const rows = [["", "@name"], ["at", "@place"], ["value", "@value"]];
    if (series.texts) rows.push(["", "@text"]);
    figure.add_tools(new Bokeh.HoverTool({ renderers: hovered, tooltips: rows, line_policy: "nearest" }));
    if (series.links) {
      source.selected.properties.indices.change.connect(() => {
        const [first] = source.selected.indices;
        if (first !== undefined) window.location.assign(series.links[first]);
      });
      figure.add_tools(new Bokeh.TapTool({ renderers: hovered }));
    }
    return [...renderers, ...hovered];
  }

  function addReferences(figure, spec, css, legend) {
    for (const [name, kind, value] of spec.references) {
      const color = css("muted");
      const dash = { line_color: color, line_dash: "dashed", line_width: 1.5 };
      const isAcross = (kind === "y") !== Boolean(spec.horizontal);
      const item = kind === "diagonal"
        ? figure.segment({ x0: 0, y0: 0, x1: 1, y1: 1, ...dash })
        : new Bokeh.Span({ location: value, dimension: isAcross ? "width" : "height", ...dash });
      if (kind !== "diagonal") {
        figure.add_layout(item);
        // An invisible point, because axes that follow the data ignore lines.
        const [p, v] = kind === "y" ? [spec.series[0]?.x[0] ?? 0, value] : [value, spec.series[0]?.y.find((y) => y !== null) ?? 0];
        figure.scatter({ x: [spec.horizontal ? v : p], y: [spec.horizontal ? p : v], size: 1, fill_alpha: 0, line_alpha: 0 });
      }
      if (!name) continue;
      const label = kind === "diagonal" ? name : `${name} (${Number(value.toPrecision(3))})`;
      legend.set(label, { color: "muted", dashed: true, items: [item] });
    }
  }

  function addImage(figure, image, spec, css) {
    const bytes = Uint8Array.from(atob(image.levels), (c) => c.charCodeAt(0));
    const levels = new Uint16Array(bytes.buffer);
    const values = new Float64Array(levels.length);
    levels.forEach((level, k) => { values[k] = level === 65535 ? NaN : image.low + (level / 65534) * (image.high - image.low); });
    const { rows, columns } = image;
    figure.x_range = new Bokeh.Range1d({ start: -0.5, end: columns - 0.5 });
    figure.y_range = new Bokeh.Range1d({ start: rows - 0.5, end: -0.5 });
    const palette = Bokeh.Palettes.cividis(256);
    const mapper = new Bokeh.LinearColorMapper({ palette, low: image.low, high: image.high, nan_color: css("border") });
    const array = Bokeh.require("core/util/ndarray").ndarray(values, { dtype: "float64", shape: [rows, columns] });
    const source = new Bokeh.ColumnDataSource({ data: { image: [array] } });
    const drawn = figure.image({ image: { field: "image" }, x: -0.5, y: -0.5, dw: columns, dh: rows, color_mapper: mapper, source });
    figure.add_tools(new Bokeh.HoverTool({ renderers: [drawn], tooltips: [["column", "$x{0}"], ["row", "$y{0}"], ["value", "@image"]] }));
    const bar = new Bokeh.ColorBar({
      color_mapper: mapper, width: 12, padding: 4, background_fill_alpha: 0, title: plain(image.label), title_text_color: css("text"), title_text_font: FONT, major_label_text_font: FONT,
      major_label_text_color: css("text"), bar_line_color: null,
    });
    figure.add_layout(bar, "right");
  }

  function addZoom(box, figure, spec) {
    const ranges = [figure.x_range, figure.y_range];
    const limits = ranges.map(({ start, end }) => ({ start, end }));
    const scale = (factor) => {
      for (const r of ranges) {
        const center = (r.start + r.end) / 2;
        r.setv({ start: center + (r.start - center) * factor, end: center + (r.end - center) * factor });
      }
    };
    const buttons = [["+", "Zoom in", () => scale(0.7)], ["−", "Zoom out", () => scale(1 / 0.7)], ["reset", "Reset the zoom", () => ranges.forEach((r, k) => r.setv(limits[k]))]];
    for (const [text, label, action] of buttons) {
      const button = make("button", { type: "button", textContent: text, ariaLabel: `${label}: ${spec.title}` });
      button.addEventListener("click", action);
      box.append(button);
    }
  }

  function addTable(box, spec) {
    const rows = spec.image ? [] : spec.series.flatMap((s) => s.x.map((x, k) => [s.name, spec.x.names ? spec.x.names[x] ?? "" : format(x), format(s.y[k]), s.low ? `${format(s.low[k])} to ${format(s.high[k])}` : ""]));
    if (!rows.length) return;
    const details = make("details");
    details.append(make("summary", { textContent: "data" }));
    details.addEventListener("toggle", () => {
      if (details.childElementCount > 1) return;
      const table = make("table");
      table.createCaption().textContent = spec.title;
      const head = table.createTHead().insertRow();
      for (const name of ["series", spec.x.label, spec.y.label, "interval"]) head.append(make("th", { scope: "col", textContent: name }));
      const body = table.createTBody();
      for (const row of rows.slice(0, 1000)) {
        const line = body.insertRow();
        for (const value of row) line.insertCell().textContent = value;
      }
      const region = make("div", { className: "table", tabIndex: 0, ariaLabel: `data of ${spec.title}` });
      region.setAttribute("role", "group");
      region.append(table);
      details.append(region);
    });
    box.append(details);
  }

  function addLegend(holder, legend) {
    const list = make("ul", { className: "legend" });
    for (const [name, { items, color, dashed }] of legend) {
      const button = make("button", { type: "button" });
      const swatch = make("i", { className: dashed ? "dashed" : "" });
      swatch.style.setProperty("--swatch", `var(--${color})`);
      button.append(swatch, name);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const isShown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(isShown));
        for (const item of items) item.visible = isShown;
      });
      const entry = make("li");
      entry.append(button);
      list.append(entry);
    }
    holder.append(list);
  }

  function compose(spec, css, width) {
    const legend = new Map();
    const figure = makeFigure(spec, css, width);
    if (spec.image) addImage(figure, spec.image, spec, css);
    spec.barCount = spec.series.filter((s) => s.kind === "bars").length;
    let bars = 0;
    for (const series of spec.series) {
      const color = colorOf(series, legend);
      if (series.kind === "bars") series.barNumber = bars++;
      const entry = legend.get(series.name);
      entry.color = color;
      entry.dashed = series.dashed;
      entry.items.push(...addSeries(figure, series, css(color), spec));
    }
    addReferences(figure, spec, css, legend);
    return { figure, legend };
  }

  const specOf = (holder) => JSON.parse(holder.parentElement.querySelector('script[type="application/json"]').textContent);

  async function draw(holder) {
    if (holder.dataset.state === "drawing") return;
    const isOpen = holder.querySelector("details")?.open;
    holder.dataset.state = "drawing";
    const spec = specOf(holder);
    spec.title = holder.dataset.title;
    const { figure, legend } = compose(spec, theme(), holder.clientWidth);
    figure.add_tools(new Bokeh.BoxZoomTool(), new Bokeh.WheelZoomTool({ modifiers: { ctrl: true } }), new Bokeh.ResetTool());
    const target = make("div");
    target.setAttribute("role", "img");
    target.setAttribute("aria-label", `${spec.title}; ${spec.y.label} by ${spec.x.label}`);
    if (spec.square) target.style.maxWidth = `${spec.height + 80}px`;
    const tools = make("div", { className: "zoom" });
    holder.replaceChildren(target);
    addLegend(holder, legend);
    holder.append(tools);
    await Bokeh.Plotting.show(figure, target);
    addZoom(tools, figure, spec);
    addTable(tools, spec);
    if (isOpen) holder.querySelector("details").open = true;
    holder.dataset.state = "drawn";
  }

  // A plot cannot be drawn again when printing begins. Its picture for paper is light, and of a fixed width.
  async function addPrinted(holder) {
    const spec = specOf(holder);
    const target = make("div", { className: "drawing" });
    holder.before(target);
    const isWide = holder.parentElement.parentElement.childElementCount === 1 || !holder.closest(".plots, .cards");
    const width = spec.square ? spec.height + 60 : isWide ? 900 : 460;
    const { figure } = compose(spec, theme(target), width);
    figure.setv({ sizing_mode: "fixed", width });
    const view = await Bokeh.Plotting.show(figure, target);
    const svg = view.export("svg").ctx.get_serialized_svg(true);
    target.replaceWith(make("img", { className: "printed", width, alt: "", src: `data:image/svg+xml,${encodeURIComponent(svg)}` }));
    view.remove();
  }

  const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 50));
  const nearby = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting && !entry.target.dataset.state) draw(entry.target);
  }, { rootMargin: "200px" });

  const isPrintable = document.body.hasAttribute("data-printable");

  function drawPlots(root) {
    const holders = Array.from(root.querySelectorAll("[data-plot]"));
    for (const holder of holders) {
      holder.style.minHeight = `${holder.dataset.height}px`;
      nearby.observe(holder);
    }
    const next = async () => {
      const holder = holders.find((h) => h.isConnected && !h.dataset.state);
      const last = isPrintable && holders.find((h) => h.isConnected && h.previousElementSibling.className !== "printed");
      if (holder) await draw(holder);
      else if (last) await addPrinted(last);
      else return;
      idle(next);
    };
    idle(next);
  }
  Bokeh.set_log_level("warn");
  drawPlots(document);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const holder of document.querySelectorAll('[data-state="drawn"]')) draw(holder);
  });
  window.tracestore = { ...window.tracestore, drawPlots };
})();
