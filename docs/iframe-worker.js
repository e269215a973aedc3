// The search runs in a worker, which a page opened from disk may not start: there an invisible frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `
        <script>postMessage = data => parent.postMessage(data, "*")</script>
        <script src="${String(url).replaceAll("&", "&amp;")}"></script>`;
      this.isLoaded = new Promise(resolve => this.frame.onload = resolve);
      window.addEventListener("message", ({data, source}) => {
        if (source === this.frame.contentWindow) this.dispatchEvent(new MessageEvent("message", {data}));
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      // The frame's own postMessage is the worker's, which answers.
      this.isLoaded.then(() => window.postMessage.call(this.frame.contentWindow, data, "*"));
    }
  };
}
