// Live controls: parts of the page follow the controls, and the address follows both.
"use strict";
(() => {
  let latest = 0;
  let timer = 0;

  function addressOf(form) {
    const values = new URLSearchParams();
    for (const [name, value] of new FormData(form)) {
      if (value !== "" && value !== form.elements[name].dataset?.default) values.append(name, value);
    }
    const text = values.toString();
    return form.getAttribute("action") + (text ? `?${text}` : "");
  }

  // Replace the parts that depend on the controls, which keep their focus.
  async function show(address) {
    const ticket = ++latest;
    let page;
    try {
      page = new DOMParser().parseFromString(await (await fetch(address)).text(), "text/html");
    } catch {
      for (const line of document.querySelectorAll("[role=alert]")) line.textContent = "The server does not answer: start tracestore serve again.";
      return;
    }
    if (ticket !== latest) return;
    const parts = Array.from(document.querySelectorAll("[data-part]"), (part) => [part, page.getElementById(part.id)]);
    if (parts.some(([, fresh]) => !fresh || (fresh.querySelector("[data-plot]") && !window.Bokeh))) {
      location.assign(address);
      return;
    }
    for (const [part, fresh] of parts) {
      const open = Array.from(part.querySelectorAll("details[id][open]"), (d) => d.id);
      part.replaceWith(document.adoptNode(fresh));
      for (const id of open) document.getElementById(id)?.setAttribute("open", "");
      window.tracestore.enhance(fresh);
      window.tracestore.drawPlots?.(fresh);
    }
    history.replaceState(null, "", address);
  }

  function update(form, delay) {
    clearTimeout(timer);
    timer = setTimeout(() => show(addressOf(form)), delay);
  }

  for (const form of document.querySelectorAll("form.controls")) {
    form.addEventListener("input", (event) => update(form, event.target.matches("select, [type=checkbox]") ? 0 : 80));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      update(form, 0);
    });
  }
  document.addEventListener("click", (event) => {
    const token = event.target.closest("#view .tokens > span");
    const form = document.querySelector("form.controls");
    if (!token || !form?.elements.token) return;
    form.elements.token.value = Array.prototype.indexOf.call(token.parentElement.children, token);
    update(form, 0);
  });
})();
