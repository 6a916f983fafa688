//! Command-line flags: flags that every program has, and an environment variable for each flag of a program.
//!
//! The variable of a flag is `NESTOR_` and the flag's name in capitals: `NESTOR_LOG_LEVEL` for `--log-level`. Commands for
//! operators have variables for their connection only: a variable that was set for another purpose must not change what a
//! command deletes.

use std::net::SocketAddr;

use clap::{Arg, Command, Parser};

/// Flag of the HTTP endpoint.
#[derive(Debug, Clone, clap::Args)]
pub struct HttpArgs {
    /// Address on which to serve /healthz, /readyz and /metrics, without TLS. [default: not served]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub http_listen: Option<SocketAddr>,
}

/// Parses the command line and the environment of a program. Exits on errors, and for `--help` and `--version`.
pub fn parse<Cli: Parser>() -> Cli {
    let mut command = with_env(Cli::command());
    let matches = command.get_matches_mut();
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.format(&mut command).exit())
}

/// Adds the environment variable of each flag, except for those of subcommands. The help never shows the values of
/// variables, because they may be secret.
pub fn with_env(command: Command) -> Command {
    command.mut_args(|arg| {
        let arg = arg.hide_env_values(true);
        match arg.get_long().map(variable) {
            // clap keeps names for the life of the process, of which there is one command line.
            Some(variable) if arg.get_env().is_none() => arg.env(&*variable.leak()),
            _ => arg,
        }
    })
}

/// Environment variable of a flag.
fn variable(flag: &str) -> String {
    format!("NESTOR_{}", flag.replace('-', "_").to_uppercase())
}

/// What is wrong with the flags of a program, for unit tests: flags without a help text, and, except for subcommands, without
/// their variable.
pub fn faults(command: &Command) -> Vec<String> {
    let own = command.get_arguments().filter(|arg| !is_built_in(arg));
    let own = own.filter_map(|arg| fault(command, arg, arg.get_env().is_none()));
    let below = command.get_subcommands().flat_map(faults_below);
    own.chain(below).collect()
}

fn faults_below(command: &Command) -> Vec<String> {
    let own = command.get_arguments().filter(|arg| !is_built_in(arg));
    let own = own.filter_map(|arg| fault(command, arg, false));
    own.chain(command.get_subcommands().flat_map(faults_below)).collect()
}

fn is_built_in(arg: &Arg) -> bool {
    matches!(arg.get_id().as_str(), "help" | "version")
}

fn fault(command: &Command, arg: &Arg, lacks_variable: bool) -> Option<String> {
    let what = format!("{} {}", command.get_name(), arg.get_id());
    if arg.get_help().is_none() {
        return Some(format!("{what} has no help text"));
    }
    let expected = variable(arg.get_long()?);
    match arg.get_env() {
        Some(env) if env.to_str() != Some(&*expected) => {
            Some(format!("the variable of {what} is not {expected}"))
        }
        Some(_) if !arg.is_hide_env_values_set() => {
            Some(format!("the help of {what} shows its variable's value"))
        }
        None if lacks_variable => Some(format!("{what} has no environment variable")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        /// A switch.
        #[arg(long)]
        test_only_switch: bool,
        #[command(flatten)]
        http: HttpArgs,
        #[arg(long, env = "ODD")]
        undocumented: Option<String>,
    }

    #[test]
    fn each_flag_has_a_variable_and_its_faults_are_found() {
        assert_eq!(faults(&Cli::command()).len(), 3);
        assert_eq!(faults(&with_env(Cli::command())), ["process-kit undocumented has no help text"]);
    }

    #[test]
    fn a_switch_accepts_only_a_truth_value_from_its_variable() {
        let command = with_env(Cli::command()).mut_arg("test_only_switch", |arg| arg.env("CARGO_PKG_NAME"));
        // The value of this variable is not a truth value.
        assert!(command.try_get_matches_from(["program"]).is_err());
        let matches =
            with_env(Cli::command()).try_get_matches_from(["program", "--test-only-switch"]).unwrap();
        assert!(Cli::from_arg_matches(&matches).unwrap().test_only_switch);
    }

    #[test]
    fn the_help_names_the_variable() {
        let help = with_env(Cli::command()).render_long_help().to_string();
        assert!(help.contains("[env: NESTOR_HTTP_LISTEN]"), "{help}");
    }
}
