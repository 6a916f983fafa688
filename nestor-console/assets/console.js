"use strict";
// Adds new events to the table. Every value is written as text, never as markup.

const rows = document.getElementById("event-rows");
const live = document.getElementById("live");

function cell(text, name) {
  const cell = document.createElement("td");
  cell.textContent = text;
  cell.className = name;
  return cell;
}

function time(event) {
  const time = document.createElement("time");
  time.dateTime = event.time;
  time.title = event.time;
  time.textContent = event.clock;
  const parent = document.createElement("td");
  parent.append(time);
  return parent;
}

// A repeated event replaces its earlier row.
function removeEarlier(uid) {
  for (const row of [...rows.rows]) {
    if (row.dataset.uid === uid || row.dataset.uid === undefined) row.remove();
  }
}

function show(event) {
  removeEarlier(event.uid);
  const row = document.createElement("tr");
  row.dataset.uid = event.uid;
  row.className = "new";
  row.append(time(event), cell(event.type, event.type), cell(event.object, ""), cell(event.reason, ""));
  row.append(cell(event.message, "why"));
  rows.prepend(row);
  while (rows.rows.length > Number(rows.dataset.rows)) rows.lastElementChild.remove();
}

const source = new EventSource(rows.dataset.stream);
source.addEventListener("open", () => { live.textContent = "Live: new events appear here."; });
source.addEventListener("error", () => { live.textContent = "Not live: connecting again. Reload the page if this lasts."; });
source.addEventListener("message", (message) => show(JSON.parse(message.data)));
