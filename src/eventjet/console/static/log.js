// Pause and continue: while paused, what arrives is kept back, the newest of it, and shown when it goes on.
"use strict";
(() => {
  const tail = document.getElementById("tail");
  const button = document.getElementById("pause");
  const said = document.getElementById("live-said");
  if (!tail || !button) return;
  let kept = null;
  let paused = false;
  button.hidden = false;
  tail.addEventListener("htmx:sse:before:message", (event) => {
    if (!paused) return;
    kept = event.detail.message.data;
    event.preventDefault();
    said.textContent = "Paused. There is something new.";
  });
  button.addEventListener("click", () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    button.textContent = paused ? "Continue" : "Pause";
    said.textContent = paused ? "Paused." : "The newest events come by themselves.";
    if (!paused && kept !== null) {
      htmx.swap({ sourceElement: tail, target: tail, text: kept, swap: "innerMorph" });
      kept = null;
    }
  });
})();
