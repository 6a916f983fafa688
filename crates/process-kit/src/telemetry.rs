//! Logs: the same flags and formats for every program.

use std::io::{self, Write};

use tracing_subscriber::EnvFilter;

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

/// Starts logging to standard error.
pub fn init(args: &LogArgs) -> Result<(), String> {
    let filter = EnvFilter::try_new(&args.log_level)
        .map_err(|error| format!("--log-level {:?} is invalid: {error}", args.log_level))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false);
    match args.log_format {
        LogFormat::Text => builder.with_writer(|| Lines(std::io::stderr())).init(),
        // The JSON format escapes control characters itself.
        LogFormat::Json => {
            let builder = builder.with_writer(std::io::stderr).json();
            // The list of spans includes the current one.
            builder.flatten_event(true).with_current_span(false).init();
        }
    }
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
