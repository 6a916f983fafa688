//! Logs: one format for every binary, chosen by the same two flags.

use tracing_subscriber::EnvFilter;

/// How to log.
#[derive(Debug, Clone, clap::Args)]
pub struct LogArgs {
    /// What to log: a level, or directives such as `info,gc_csi=debug`.
    #[arg(long, global = true, env = "NESTOR_LOG", default_value = "info")]
    pub log_level: String,
    /// How to write it.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// The shape of a log line.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For log stores: one JSON object per line.
    Json,
}

/// Starts logging to standard error.
pub fn init(args: &LogArgs) -> Result<(), String> {
    let filter = EnvFilter::try_new(&args.log_level)
        .map_err(|error| format!("--log-level {:?} is not understood: {error}", args.log_level))?;
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false);
    match args.log_format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}
