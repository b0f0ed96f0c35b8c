/* Search runs in a worker, which browsers refuse to pages that are opened from the disk. There, a
 * hidden frame takes the worker's place: it loads the worker's script and exchanges its messages. */
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.appendChild(frame);
    this.inner = frame.contentWindow;
    this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.loaded = new Promise((loaded) => {
      const script = this.inner.document.createElement("script");
      script.src = new URL(url, location.href);
      script.onload = loaded;
      this.inner.document.body.appendChild(script);
    });
  }

  postMessage(data) {
    this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
