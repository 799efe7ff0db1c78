// Before the page is drawn: light or dark, as chosen before. Without a choice, as the system has it.
"use strict";
try {
  const theme = localStorage.getItem("posthouse-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Nothing is kept here (private window): as the system has it.
}
document.documentElement.classList.add("scripted");
