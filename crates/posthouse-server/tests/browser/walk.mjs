// Walks through the dashboard as a person does, and says what is not as it should be. Run by `every_page_and_every_action_in_a_browser`.
import { execFile } from "node:child_process";
import { promisify } from "node:util";
import { chromium } from "playwright-core";

const { BASE, CHROMIUM, SHOTS, POSTHOUSE } = process.env;
const FAILED = Number(process.env.FAILED);
const PATIENCE = 30000;
const run = promisify(execFile);
const wrong = [];
const began = Date.now();
let step = "start";
const doing = (what) => {
  step = what;
  console.log(`${((Date.now() - began) / 1000).toFixed(1)} s  ${what}`);
};
const check = (good, what) => {
  if (!good) wrong.push(`${step}: ${what}`);
};

const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });

async function fresh(options) {
  const context = await browser.newContext({ locale: "en-GB", timezoneId: "UTC", reducedMotion: "reduce", ...options });
  context.setDefaultTimeout(PATIENCE);
  const page = await context.newPage();
  // Also tells what the page's policy stopped. What the server refuses, the page itself says.
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type()) && !message.text().includes("responded with a status of 4")) wrong.push(`${step}: console: ${message.text()} (${page.url()})`);
  });
  page.on("pageerror", (error) => wrong.push(`${step}: error in the page: ${error} (${page.url()})`));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(BASE) && !url.startsWith("data:")) wrong.push(`${step}: the page asked for ${url}`);
  });
  return page;
}
const wide = { viewport: { width: 1280, height: 800 } };
const narrow = { viewport: { width: 390, height: 844 }, isMobile: true, hasTouch: true, deviceScaleFactor: 2 };
// What a person sees first; all of a page that is short.
const shot = async (page, name) => {
  const tall = await page.evaluate(() => document.documentElement.scrollHeight > 3 * innerHeight);
  await page.screenshot({ path: `${SHOTS}/${name}.png`, fullPage: !tall, type: "png" });
};
const focused = (page) => page.evaluate(() => document.activeElement?.textContent?.trim().slice(0, 40) || document.activeElement?.tagName);

// Tabs until the focus is on an element with this text; false when it isn't reached.
async function tabTo(page, text, most = 80) {
  for (let n = 0; n < most; n += 1) {
    await page.keyboard.press("Tab");
    if ((await focused(page)).startsWith(text)) return true;
  }
  return false;
}

// Text that can't be told from what is behind it, by WCAG 2 level AA.
const contrast = (page) => page.evaluate(() => {
  const channel = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (colour) => {
    if (known.has(colour)) return known.get(colour);
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    known.set(colour, [r / 255, g / 255, b / 255, a / 255]);
    return known.get(colour);
  };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [1, 1, 1]);
  };
  const found = new Set();
  const seen = new Map();
  for (const element of document.querySelectorAll("body *")) {
    // Of what looks the same a few are enough.
    const look = `${element.tagName} ${element.className} ${element.closest("tr")?.className}`;
    seen.set(look, (seen.get(look) ?? 0) + 1);
    if (seen.get(look) > 4) continue;
    const text = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!text || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true }) || element.closest(".hidden, .skip, option, datalist, [disabled]")) continue;
    const style = getComputedStyle(element);
    const ground = behind(element);
    const ink = over(rgba(style.color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) found.add(`${element.tagName}.${element.className} "${element.textContent.trim().slice(0, 30)}" ${ratio.toFixed(2)}`);
  }
  return [...found];
});

// What is wider than the screen.
const overflow = (page) => page.evaluate(() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  return [...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > width + 1 && !e.closest(".hidden, pre"))
    .map((e) => `${e.tagName}.${e.className}`).slice(0, 8);
});

// Controls without a name that can be read out.
const nameless = (page) => page.evaluate(() => [...document.querySelectorAll("button, a[href], input:not([type=hidden]), select")]
  .filter((e) => e.checkVisibility() && !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length))
  .map((e) => e.outerHTML.slice(0, 80)));

try {
  const page = await fresh(wide);
  const row = (text) => page.locator("table.cards tbody tr", { hasText: text });

  doing("overview");
  await page.goto(`${BASE}/?db=main`);
  check(await page.locator(".tile", { hasText: "Failed" }).locator(".value").first().textContent() !== "", "tiles are there");
  await page.waitForSelector(".live-state.on");

  doing("filter by status, open one");
  await page.goto(`${BASE}/messages?db=main`);
  await page.getByRole("link", { name: "Failed", exact: true }).click();
  await page.waitForURL(/status=FAILED/);
  check((await page.locator("table.cards tbody tr").count()) === 50, "50 rows");
  await page.getByRole("link", { name: "Next →" }).click();
  await page.waitForURL(/before=/);
  await page.getByRole("link", { name: "← Back" }).click();
  await page.getByText("Filter", { exact: true }).click();
  await page.getByLabel("Key").fill(`order-${FAILED - 1}`);
  await page.getByRole("button", { name: "Show" }).last().click();
  await page.waitForURL(/key=order-/);
  // On a slow machine the search may stop and go on with the next page.
  while ((await page.locator("table.cards tbody tr").count()) === 0) await page.getByRole("link", { name: "Next →" }).click();
  check((await page.locator("table.cards tbody tr").count()) === 1, "the filter finds one");
  await page.locator("table.cards tbody th a").click();
  await page.waitForSelector("h1:has-text('Message')");
  check(await page.getByText("<script>alert(1)</script>", { exact: false }).first().isVisible(), "the payload is shown as text");
  check((await page.locator(".timeline li").count()) === 4, "published and three attempts");
  check((await page.getByRole("link", { name: "4bf92f3577b34da6a3ce929d0e0e4736" }).getAttribute("href")) === "https://traces.example/4bf92f3577b34da6a3ce929d0e0e4736", "trace link");
  await shot(page, "message");

  doing("requeue with the keyboard alone");
  await page.focus("#main");
  check(await tabTo(page, "Requeue…", 10), "the action is reached by Tab");
  await page.keyboard.press("Enter");
  await page.waitForSelector("#requeue-dialog[open]");
  const seen = new Set();
  for (let n = 0; n < 6; n += 1) {
    seen.add(await page.evaluate(() => Boolean(document.activeElement.closest("dialog")) || document.activeElement === document.body));
    await page.keyboard.press("Tab");
  }
  check(!seen.has(false), "the focus stays in the dialog");
  await page.keyboard.press("Escape");
  check((await page.locator("dialog[open]").count()) === 0, "Escape closes the dialog");
  check((await focused(page)).startsWith("Requeue…"), `the focus is back on the button, not on ${await focused(page)}`);
  await page.keyboard.press("Enter");
  await page.waitForSelector("#requeue-dialog[open]");
  await page.keyboard.press("Enter");
  await page.waitForSelector("#notice .panel.good:has-text('requeued')");
  await page.waitForSelector(".title .badge:has-text('PENDING')");
  check((await page.locator("dialog[open]").count()) === 0, "the dialog is closed when it is done");
  check((await page.locator(".timeline li:has-text('requeue')").count()) === 1, "the timeline has it");

  doing("send elsewhere, skip");
  await page.getByRole("button", { name: "Send elsewhere…" }).click();
  await page.locator("#edit-dialog input[name=destination]").fill("nowhere-known");
  await page.getByRole("button", { name: "Send there" }).click();
  await page.waitForSelector("#notice .panel.bad:has-text('nowhere-known')");
  await page.getByRole("button", { name: "Send elsewhere…" }).click();
  await page.locator("#edit-dialog input[name=destination]").fill("orders");
  await page.getByRole("button", { name: "Send there" }).click();
  await page.waitForSelector("#notice .panel.good");
  await page.waitForSelector("dd:has-text('orders')");
  check(await page.getByText("Published to").isVisible(), "where it was published to is told");
  await page.getByRole("button", { name: "Skip…" }).click();
  await page.getByRole("button", { name: "Skip", exact: true }).click();
  await page.waitForSelector("#notice .panel.good:has-text('skipped')");
  await page.waitForSelector(".title .badge:has-text('FAILED')");

  doing("what the server refuses is said");
  await page.evaluate(() => { document.querySelector('meta[name="csrf"]').content = "wrong"; });
  await page.getByRole("button", { name: "Requeue…" }).click();
  await page.getByRole("button", { name: "Requeue", exact: true }).click();
  await page.waitForSelector("#notice .panel.bad:has-text('CSRF')");
  check((await page.locator("main").count()) === 1, "its page is not put into this one");

  doing("all that a filter finds");
  await page.goto(`${BASE}/messages?db=main&status=FAILED&destination=returns`);
  await page.getByRole("button", { name: "Requeue all…" }).click();
  await page.waitForSelector("#dialog[open]");
  const title = await page.locator("#dialog-title").textContent();
  check(title.replace(/\D/g, "") === String(FAILED - 1), `the dialog states the count: ${title}`);
  check(await page.evaluate(() => Boolean(document.activeElement.closest("#dialog"))), "the focus is in the dialog");
  await shot(page, "bulk-ask");
  await page.getByRole("button", { name: /^Requeue \d/ }).click();
  await page.waitForSelector("#dialog progress");
  await page.screenshot({ path: `${SHOTS}/bulk-progress.png` });
  await page.waitForSelector("#dialog [data-said]");
  check((await page.locator("#dialog [data-said]").textContent()).replace(/\D/g, "") === String(FAILED - 1), "all were changed");
  check((await page.locator("#notice").textContent()).includes("done"), "it is said for those who can't see it");
  await page.screenshot({ path: `${SHOTS}/bulk-done.png` });
  await page.getByRole("button", { name: "Close" }).click();
  await page.waitForSelector(".empty");

  doing("pause, resume and run a group");
  await page.goto(`${BASE}/groups?db=main`);
  await row("nightly").first().getByRole("button", { name: "Pause nightly" }).click();
  await page.waitForSelector("#notice .panel.good:has-text('is paused')");
  await page.getByRole("button", { name: "Resume nightly" }).click();
  await page.waitForSelector("#notice .panel.good:has-text('goes on')");
  await page.getByRole("button", { name: "Run nightly now" }).click();
  await page.waitForSelector("#notice .panel.good:has-text('was asked for')");
  await page.locator("[aria-labelledby=runs-h] tr", { hasText: "relay" }).or(page.locator("[aria-labelledby=runs-h] .badge", { hasText: "DONE" })).first().waitFor();

  doing("inbox");
  await page.goto(`${BASE}/inbox?db=main&status=FAILED`);
  check((await page.locator("table.cards tbody tr").count()) === 40, "40 failed");
  await page.locator("table.cards tbody th a").first().click();
  await page.getByRole("button", { name: "Requeue…" }).click();
  await page.getByRole("button", { name: "Requeue", exact: true }).click();
  await page.waitForSelector("#notice .panel.good:has-text('requeued')");
  await shot(page, "received");
  await page.goto(`${BASE}/inbox?db=main&status=FAILED`);
  await page.getByRole("button", { name: "Skip all…" }).waitFor();
  await page.getByRole("button", { name: "Requeue all…" }).click();
  await page.getByRole("button", { name: /^Requeue 39/ }).click();
  await page.waitForSelector("#dialog [data-said]:has-text('39 changed')");
  await page.getByRole("button", { name: "Close" }).click();

  doing("silence an alert, and end that");
  await page.goto(`${BASE}/alerts?db=main`);
  await row("FIRING").getByRole("button", { name: /^Silence outbox_failed orders for 1 hour/ }).click();
  await page.waitForSelector("#notice .panel.good:has-text('is silenced')");
  await page.waitForSelector("[aria-labelledby=silences-h]");
  await row("orders").filter({ hasText: "silenced" }).first().waitFor();
  await page.getByRole("button", { name: /^End the silence/ }).click();
  await page.waitForSelector("#notice .panel.good:has-text('no longer silenced')");
  await row("FIRING").first().waitFor();

  doing("audit");
  await page.goto(`${BASE}/audit?db=main`);
  for (const action of ["inbox bulk requeue", "group run", "group pause", "inbox requeue"]) {
    check((await row(action).count()) > 0, `${action} is in the audit log`);
  }
  await page.goto(`${BASE}/audit?db=main&action=bulk+requeue`);
  check((await row("local").count()) === 1, "the bulk action has its line");

  doing("what is new comes by itself");
  await page.goto(`${BASE}/messages?db=shop`);
  await page.waitForSelector(".live-state.on");
  await run(POSTHOUSE, ["--database", "shop", "publish", "orders", '{"live":true}', "--key", "comes-live"]);
  await page.waitForSelector("td:has-text('comes-live')");
  await page.evaluate(() => {
    Object.defineProperty(document, "hidden", { value: true, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
  });
  check((await page.locator("#live-state").textContent()) === "Paused", "nothing is asked for while nobody looks");
  await page.evaluate(() => {
    Object.defineProperty(document, "hidden", { value: false, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
  });
  await page.waitForSelector(".live-state.on");

  doing("charts");
  await page.goto(`${BASE}/`);
  for (const chart of ["rates", "latency", "oldest"]) await page.waitForSelector(`#chart-${chart} canvas`);
  check(await page.locator(".panel.bad", { hasText: "gone" }).first().isVisible(), "the database that is down is told");

  doing("theme is kept");
  await page.getByRole("button", { name: "Theme: system" }).click();
  await page.getByRole("button", { name: "Theme: light" }).click();
  await page.reload();
  check((await page.evaluate(() => document.documentElement.dataset.theme)) === "dark", "dark after a reload");
  await page.context().close();

  doing("read without scripts");
  const plain = await fresh({ ...wide, javaScriptEnabled: false });
  await plain.goto(`${BASE}/messages?db=main`);
  check((await plain.locator("table.cards tbody tr").count()) === 50, "the list is there");
  check(!(await plain.locator("#theme").isVisible()), "no button that does nothing");
  await plain.context().close();

  const pages = {
    overview: "/", messages: "/messages?db=main&key=order-7", message: `/messages/${FAILED - 1}?db=main`,
    inbox: "/inbox?db=main&status=FAILED", received: "/inbox/message?db=main&consumer=inventory&id=failed-7", houses: "/houses?db=main",
    groups: "/groups?db=main", runs: "/runs?db=main", alerts: "/alerts?db=main", retention: "/retention?db=main", audit: "/audit?db=main", down: "/messages?db=gone", missing: "/messages/99999999?db=main",
  };
  for (const [kind, screen] of [["wide", wide], ["narrow", narrow]]) {
    const one = await fresh(screen);
    for (const [name, path] of Object.entries(pages)) {
      // It waits for an answer that doesn't come: once is enough.
      if (name === "down" && kind === "wide") continue;
      doing(`${name}, ${kind}`);
      await one.emulateMedia({ colorScheme: "light" });
      await one.goto(BASE + path);
      if (name === "overview") await one.waitForSelector("#chart-oldest canvas");
      for (const colorScheme of ["light", "dark"]) {
        await one.emulateMedia({ colorScheme });
        for (const found of await contrast(one)) check(false, `${colorScheme}: low contrast: ${found}`);
        // A picture of each in one scheme, and of the overview in both.
        if (name === "overview" || (kind === "wide") === (colorScheme === "light")) await shot(one, `${name}-${kind}-${colorScheme}`);
      }
      for (const found of await overflow(one)) check(false, `wider than the screen: ${found}`);
      for (const found of await nameless(one)) check(false, `has no name: ${found}`);
    }
    await one.context().close();
  }
} catch (error) {
  wrong.push(`${step}: ${error}`);
}
await browser.close();
console.log(`${((Date.now() - began) / 1000).toFixed(1)} s in all`);
for (const line of wrong) console.log(`WRONG  ${line}`);
process.exit(wrong.length ? 1 : 0);
