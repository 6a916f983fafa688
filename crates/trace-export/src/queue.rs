//! Queue of finished spans, and the task that exports them in batches.

use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use process_kit::{supervise, trace};
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::present::present;

/// Spans that wait for their export; about 4 MiB. More are dropped.
const CAPACITY: usize = 4096;
/// Spans of one export.
const BATCH: usize = 512;
/// How long a span waits for others.
const INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of the last exports when the program ends.
const FLUSH: Duration = Duration::from_secs(3);

/// Where batches go.
pub(crate) trait Export: Send + 'static {
    /// Exports a batch, or drops and counts it.
    fn export(&mut self, batch: Vec<SpanData>) -> impl Future<Output = ()> + Send;
}

/// Receives each span that ends. Never waits.
#[derive(Debug)]
pub(crate) struct Queue(Sender<SpanData>);

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.0.try_send(present(span)).is_err() {
            trace::count_dropped(1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Starts the task that exports spans. The future exports what is queued, and ends after a few seconds at most.
pub(crate) fn start(exporter: impl Export) -> (Queue, impl Future<Output = ()> + Send + 'static) {
    let (sender, spans) = mpsc::channel(CAPACITY);
    let stop = CancellationToken::new();
    let task = supervise::worker("span export", run(spans, exporter, stop.clone()));
    let flush = async move {
        stop.cancel();
        let _ = timeout(FLUSH, task).await;
    };
    (Queue(sender), flush)
}

async fn run(mut spans: Receiver<SpanData>, mut exporter: impl Export, stop: CancellationToken) {
    loop {
        let batch = next_batch(&mut spans, &stop).await;
        if batch.is_empty() {
            return;
        }
        exporter.export(batch).await;
    }
}

/// The next spans; empty if there are none and the program ends.
async fn next_batch(spans: &mut Receiver<SpanData>, stop: &CancellationToken) -> Vec<SpanData> {
    let mut batch = Vec::new();
    tokio::select! {
        biased;
        count = spans.recv_many(&mut batch, BATCH) => if count == 0 { return batch },
        () = stop.cancelled() => return batch,
    }
    let until = Instant::now() + INTERVAL;
    while batch.len() < BATCH && !stop.is_cancelled() {
        let room = BATCH - batch.len();
        tokio::select! {
            biased;
            more = timeout_at(until, spans.recv_many(&mut batch, room)) => if !matches!(more, Ok(1..)) { break },
            () = stop.cancelled() => {}
        }
    }
    batch
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use opentelemetry::trace::{Tracer, TracerProvider};
    use opentelemetry_sdk::trace::SdkTracerProvider;

    use super::*;

    /// Sizes of the batches. An export takes this long.
    struct Sizes(Arc<Mutex<Vec<usize>>>, Duration);

    impl Export for Sizes {
        async fn export(&mut self, batch: Vec<SpanData>) {
            tokio::time::sleep(self.1).await;
            self.0.lock().unwrap().push(batch.len());
        }
    }

    fn end_spans(queue: Queue, count: usize) {
        let provider = SdkTracerProvider::builder().with_span_processor(queue).build();
        let tracer = provider.tracer("test");
        (0..count).for_each(|_| drop(tracer.start("csi")));
    }

    #[tokio::test(start_paused = true)]
    async fn spans_are_exported_in_batches_and_at_the_end() {
        let sizes = Arc::<Mutex<Vec<usize>>>::default();
        let (queue, flush) = start(Sizes(sizes.clone(), Duration::ZERO));
        end_spans(queue, BATCH + 3);
        flush.await;
        assert_eq!(*sizes.lock().unwrap(), [BATCH, 3]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_does_not_fit_is_dropped_and_counted_and_the_end_does_not_wait_for_a_collector_that_hangs() {
        let (queue, flush) = start(Sizes(Arc::default(), Duration::from_secs(3600)));
        let before = trace::dropped();
        end_spans(queue, CAPACITY + 7);
        assert_eq!(trace::dropped() - before, 7);
        let started = Instant::now();
        flush.await;
        assert_eq!(started.elapsed(), FLUSH);
    }
}
