/* A page opened from a folder (file://) may start no worker. This runs the search's worker in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.title = "search"
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      inner.postMessage = data => setTimeout(() => {
        const event = new MessageEvent("message", { data })
        if (this.onmessage) this.onmessage(event)
        this.dispatchEvent(event)
      })
      const load = source => new Promise((done, failed) => {
        const script = inner.document.createElement("script")
        script.src = new URL(source, location.href)
        script.onload = done
        script.onerror = failed
        inner.document.body.append(script)
      })
      inner.importScripts = (...sources) => sources.reduce((before, each) => before.then(() => load(each)), Promise.resolve())
      this.ready = load(url)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
