// What pages do besides being read: dialogs, live updates, charts, light and dark. Everything that can be read works without it.
"use strict";
(() => {
  const $ = (selector, within = document) => within.querySelector(selector);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // ---- Forms: who sends one proves that the page came from here.
  document.addEventListener("htmx:config:request", (event) => {
    const token = $('meta[name="csrf"]')?.content;
    if (token) event.detail.ctx.request.headers["X-CSRF-Token"] = token;
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
  });

  // ---- What is said beside the page.
  const notice = $("#notice");
  const say = (text, good) => {
    const panel = document.createElement("p");
    panel.className = `panel ${good ? "good" : "bad"}`;
    panel.textContent = `${text} `;
    const close = document.createElement("button");
    close.type = "button";
    close.className = "quiet";
    close.dataset.dismiss = "";
    close.setAttribute("aria-label", "Dismiss");
    close.textContent = "×";
    panel.append(close);
    notice.replaceChildren(panel);
  };
  document.addEventListener("htmx:error", (event) => {
    // A look that came to nothing is made again; an action that did not arrive must be told.
    if (event.detail.ctx?.request.method === "POST") say("The server can't be reached; nothing is known about what was asked for.", false);
  });

  // A whole page in answer to an action says why it was refused: that is told beside this page, not put into it.
  document.addEventListener("htmx:after:request", (event) => {
    const { ctx } = event.detail;
    if (ctx.response.status < 400 || ctx.target?.id === "live" || !/^\s*<!doctype/i.test(ctx.text ?? "")) return;
    event.preventDefault();
    const page = new DOMParser().parseFromString(ctx.text, "text/html");
    say($("[role=alert], .panel", page)?.textContent ?? `The server answered ${ctx.response.status}.`, false);
    ctx.sourceElement?.closest("dialog")?.close();
  });

  // ---- Dialogs. Where focus was before, it is again afterwards.
  const open = (dialog) => {
    if (dialog.open) return;
    dialog.showModal();
    ($("input:not([type=hidden])", dialog) ?? $("button", dialog))?.focus();
  };
  document.addEventListener("click", (event) => {
    const target = event.target.closest?.("[data-dialog], [data-cancel], [data-dismiss]");
    if (!target) return;
    if (target.dataset.dialog) open(document.getElementById(target.dataset.dialog));
    else if ("cancel" in target.dataset) target.closest("dialog")?.close();
    else target.closest(".panel")?.remove();
  });
  document.addEventListener("htmx:after:swap", (event) => {
    const ctx = event.detail.ctx;
    const body = $("#dialog-body");
    if (ctx?.target === body) {
      const dialog = $("#dialog");
      // A dialog that was closed while something goes on stays closed.
      if (!dialog.open && ctx.sourceElement?.closest("dialog") === dialog) return;
      open(dialog);
      if (!dialog.contains(document.activeElement) || document.activeElement === dialog) $("button", body)?.focus();
      const said = $("[data-said]", body);
      if (said) say(said.textContent, said.classList.contains("good"));
    }
    if (ctx?.sourceElement?.matches?.("form[data-close]")) ctx.sourceElement.closest("dialog")?.close();
    draw();
  });
  // While a dialog is closed nothing in it goes on asking.
  $("#dialog")?.addEventListener("close", () => $("#dialog-body").replaceChildren());

  // ---- Light and dark.
  const root = document.documentElement;
  const names = { "": "System", light: "Light", dark: "Dark" };
  const toggle = $("#theme");
  if (toggle) {
    const show = () => {
      const name = names[root.dataset.theme ?? ""];
      toggle.textContent = `◐ ${name}`;
      toggle.setAttribute("aria-label", `Theme: ${name.toLowerCase()}`);
    };
    toggle.hidden = false;
    toggle.addEventListener("click", () => {
      const order = ["", "light", "dark"];
      const next = order[(order.indexOf(root.dataset.theme ?? "") + 1) % order.length];
      if (next) root.dataset.theme = next;
      else delete root.dataset.theme;
      try {
        if (next) localStorage.setItem("posthouse-theme", next);
        else localStorage.removeItem("posthouse-theme");
      } catch {
        // It holds for this page at least.
      }
      show();
      draw(true);
    });
    show();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));

  // ---- Charts.
  let samples = [];
  let known = false;
  const charts = {};
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const time = (ms) => {
    if (ms === null || ms === undefined) return "–";
    if (ms < 1000) return `${Math.round(ms)} ms`;
    const s = ms / 1000;
    if (s < 120) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
    if (s < 7200) return `${Math.round(s / 60)} min`;
    return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
  };
  const rate = (n) => (n === null || n === undefined ? "–" : n >= 100 ? String(Math.round(n)) : String(Math.round(n * 10) / 10));
  // Round lengths of time, in milliseconds.
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 15e3, 3e4, 6e4, 12e4, 3e5, 6e5, 9e5, 18e5, 36e5, 72e5, 144e5, 216e5, 432e5, 864e5, 1728e5, 432e6, 864e6, 2592e6];
  const plans = {
    "chart-rates": {
      series: [["Published", "published", "muted"], ["Delivered", "delivered", "accent"], ["Failed attempts", "failed", "bad"]],
      value: rate,
      least: 1,
    },
    "chart-latency": { series: [["Median", "median", "accent"], ["Longest", "longest", "muted"]], value: time, steps, least: 100, dots: true },
    "chart-oldest": { series: [["Oldest", "oldest", "accent"]], value: time, scale: 1000, steps, least: 1000 },
  };
  const columns = (plan) => {
    const scaled = (n) => (n === null || n === undefined ? null : n * (plan.scale ?? 1));
    return [samples.map((s) => s.at / 1000), ...plan.series.map(([, field]) => samples.map((s) => scaled(s[field])))];
  };
  function draw(anew = false) {
    if (typeof uPlot === "undefined" || !known) return;
    for (const [id, plan] of Object.entries(plans)) {
      const place = document.getElementById(id);
      if (!place) continue;
      const there = charts[id];
      if (there && there.root.isConnected && !anew) {
        there.setData(columns(plan));
        continue;
      }
      there?.destroy();
      place.replaceChildren();
      if (samples.length < 2) {
        delete charts[id];
        const waiting = document.createElement("div");
        waiting.className = "waiting";
        waiting.textContent = "The first points come within seconds.";
        place.append(waiting);
        continue;
      }
      const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: "11px system-ui, sans-serif" };
      charts[id] = new uPlot({
        width: Math.max(place.clientWidth, 200),
        height: 170,
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        legend: { live: true },
        scales: {
          // What is new is at the right, also while there isn't an hour of it yet.
          x: { range: (_, low, high) => [Math.min(low, high - 600), high] },
          y: { range: (_, low, high) => [0, high > 0 ? high * 1.15 : plan.least] },
        },
        axes: [
          { ...axis, size: 28, space: 60, incrs: [60, 120, 300, 600, 900, 1800, 3600], values: (_, ticks) => ticks.map((t) => new Date(t * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" })) },
          { ...axis, size: 56, ...(plan.steps ? { incrs: plan.steps } : {}), values: (_, ticks) => ticks.map((t) => plan.value(t)) },
        ],
        series: [
          { value: (_, t) => (t === null ? "–" : new Date(t * 1000).toLocaleTimeString([], { hourCycle: "h23" })), label: "at" },
          ...plan.series.map(([label, , name]) => ({
            label, stroke: colour(name), width: 1.75, points: { show: plan.dots ?? false, size: 4 }, value: (_, v) => plan.value(v),
          })),
        ],
      }, columns(plan), place);
    }
  }
  let resizing;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => {
      for (const [id, chart] of Object.entries(charts)) {
        const place = document.getElementById(id);
        if (place) chart.setSize({ width: Math.max(place.clientWidth, 200), height: 170 });
      }
    }, 100);
  });
  const hour = async () => {
    const place = $("#charts");
    if (!place) return;
    try {
      const answer = await fetch(place.dataset.history, { headers: { accept: "application/json" } });
      if (!answer.ok) return;
      samples = await answer.json();
      known = true;
      draw();
    } catch {
      // The next look may be luckier.
    }
  };

  // ---- Live. One stream for a page; none while nobody sees it.
  const state = $("#live-state");
  let stream = null;
  let retry = null;
  let wait = 1000;
  const tell = (kind, text) => {
    state.hidden = false;
    state.className = `live-state ${kind}`;
    state.textContent = text;
  };
  // Nothing changes under somebody who is about to do something.
  const busy = () => $("dialog[open]") || document.activeElement?.closest?.("#live input, #live select, #live details[open], #live pre")
    || (getSelection()?.type === "Range" && $("#live")?.contains(getSelection().anchorNode));
  const look = () => {
    if (!busy()) document.body.dispatchEvent(new CustomEvent("tick"));
  };
  const listen = () => {
    const address = $("#live")?.dataset.events;
    if (!address || stream || document.hidden) return;
    stream = new EventSource(address);
    stream.addEventListener("open", () => {
      wait = 1000;
      tell("on", "Live");
    });
    stream.addEventListener("sample", (event) => {
      const sample = JSON.parse(event.data);
      if (known && samples.at(-1)?.at !== sample.at) {
        samples.push(sample);
        if (samples.length > 720) samples.shift();
        draw(samples.length === 2);
      }
      look();
    });
    stream.addEventListener("error", () => {
      // Our own pace instead of the browser's: a server that is full or gone is asked less and less often.
      stop();
      tell("off", "Not live");
      clearTimeout(retry);
      retry = setTimeout(listen, wait);
      wait = Math.min(wait * 2, 30000);
    });
  };
  const stop = () => {
    stream?.close();
    stream = null;
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      clearTimeout(retry);
      stop();
      tell("", "Paused");
    } else {
      hour();
      look();
      listen();
    }
  });
  addEventListener("pagehide", stop);
  addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
  hour();
  listen();
})();
