//! Logs: the same flags and formats for every program. Spans can also go to an exporter.

use std::io::{self, Write};

use futures::future::BoxFuture;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::text::one_line;

/// Log flags.
#[derive(Debug, Clone, clap::Args)]
pub struct LogArgs {
    /// Log level, or filter directives such as `info,gc_csi=debug`.
    #[arg(long, global = true, default_value = "info")]
    pub log_level: String,
    /// Log format.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// Log format.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum LogFormat {
    /// Human-readable text.
    Text,
    /// One JSON object per line.
    Json,
}

/// An exporter of spans.
pub struct SpanExport {
    /// Receives the spans.
    pub layer: Box<dyn Layer<Registry> + Send + Sync>,
    /// Exports what is left when the program ends.
    pub flush: BoxFuture<'static, ()>,
}

impl std::fmt::Debug for SpanExport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SpanExport").finish_non_exhaustive()
    }
}

/// Starts logging to standard error. Spans also go to `spans`, if there is one, whatever the log level.
pub fn init(args: &LogArgs, spans: Option<Box<dyn Layer<Registry> + Send + Sync>>) -> Result<(), String> {
    let filter = EnvFilter::try_new(&args.log_level)
        .map_err(|error| format!("--log-level {:?} is invalid: {error}", args.log_level))?;
    let logs = tracing_subscriber::fmt::layer().with_ansi(false);
    let logs = match args.log_format {
        LogFormat::Text => logs.with_writer(|| Lines(std::io::stderr())).boxed(),
        // The JSON format escapes control characters itself, and its list of spans includes the current one.
        LogFormat::Json => {
            logs.with_writer(std::io::stderr).json().flatten_event(true).with_current_span(false).boxed()
        }
    };
    tracing_subscriber::registry().with(spans).with(logs.with_filter(filter)).init();
    Ok(())
}

/// Writes each log event as one line: escapes line breaks.
struct Lines<W>(W);

impl<W: Write> Write for Lines<W> {
    /// Writes a complete event.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let (line, end) = text.strip_suffix('\n').map_or((&*text, ""), |line| (line, "\n"));
        self.0.write_all(format!("{}{end}", one_line(line)).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_event_is_one_line_even_if_its_values_contain_line_breaks() {
        let written = Written::default();
        let writer = written.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || Lines(writer.clone())).finish();
        let name = "a\n2026-01-01T00:00:00Z  INFO gc_csi: deleted";
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(name, "of {name}");
            tracing::info!("next");
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.lines().next().unwrap().contains("of a\\n2026"), "{text}");
        assert!(text.ends_with("next\n"), "{text}");
    }
}
