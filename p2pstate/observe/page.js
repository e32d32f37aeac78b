"use strict";
// Renews the page in place, so that it and its links to other nodes outlive the node that served it.
const RENEW_MS = 2000;
const ANSWER_MS = 8000;
let heardAt = Date.now();

async function renew() {
  try {
    const reply = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    if (!reply.ok) throw new Error(reply.statusText);
    const next = new DOMParser().parseFromString(await reply.text(), "text/html");
    if (getSelection().isCollapsed) {
      document.querySelector("main").replaceWith(next.querySelector("main"));
      document.title = next.title;
    }
    heardAt = Date.now();
    document.getElementById("gone").hidden = true;
  } catch {
    tellGone(Math.round((Date.now() - heardAt) / 1000));
  }
  setTimeout(renew, RENEW_MS);
}

function tellGone(seconds) {
  const gone = document.getElementById("gone");
  const name = document.querySelector("main").dataset.node;
  const links = [...document.querySelectorAll("a.node")].flatMap((link) => [" ", link.cloneNode(true)]);
  gone.replaceChildren(
    `${name} has not answered for ${seconds} s: it is dead, or the run has ended. What stands below is old. `,
    links.length ? "The same page on other nodes:" : "No other node serves this page.",
    ...links,
  );
  gone.querySelectorAll("a").forEach((link) => link.removeAttribute("class"));
  gone.hidden = false;
}

setTimeout(renew, RENEW_MS);
