//! Command line of `nestor-console`.

use std::process::ExitCode;

use clap::Parser;
use process_kit::telemetry::LogArgs;
use process_kit::{flags, process};
use trace_export::TraceArgs;

#[derive(Debug, Parser)]
#[command(
    name = "nestor-console",
    version,
    about = "Read-only web page for the platform team: guests, volumes, attaches, pools and events of the management cluster"
)]
struct Cli {
    #[command(flatten)]
    args: nestor_console::app::Args,
    #[command(flatten, next_help_heading = "Logs")]
    logs: LogArgs,
    #[command(flatten, next_help_heading = "Traces")]
    traces: TraceArgs,
}

fn main() -> ExitCode {
    let cli: Cli = flags::parse();
    let traces = || cli.traces.start("nestor-console");
    process::run_traced(&cli.logs, traces, 2, |stop| nestor_console::app::run(cli.args, stop))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_flag_has_a_help_text_and_an_environment_variable() {
        let command = flags::with_env(Cli::command());
        command.clone().debug_assert();
        assert_eq!(flags::faults(&command), [""; 0]);
    }

    #[test]
    fn the_storage_infra_is_optional_but_complete() {
        let parse = |words: &[&str]| {
            let words = ["nestor-console"].iter().chain(words);
            flags::with_env(Cli::command()).try_get_matches_from(words)
        };
        assert!(parse(&[]).is_ok());
        assert!(parse(&["--infra-url=https://a"]).is_err() && parse(&["--infra-key=c"]).is_err());
        let all = ["--infra-url=https://a", "--infra-ca=a", "--infra-cert=b", "--infra-key=c"];
        assert!(parse(&all).is_ok());
    }
}
