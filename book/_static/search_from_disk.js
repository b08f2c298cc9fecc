// The search fetches each page it found to show an excerpt. From a disk the browser refuses that, so a
// reader without a server gets the list without excerpts instead of errors.
if (window.location.protocol === "file:") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}
