//! Page of the flags, from the help of each program.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result};
use clap::CommandFactory;

use super::Generated;
use super::markdown::{page as new_page, paragraph};
use crate::cli::Cli;
use crate::process::{command, run};

/// The programs of a release.
const PROGRAMS: [&str; 8] = [
    "gc-csi",
    "gc-csi-node",
    "mgmt-csi",
    "mgmt-csi-node",
    "vm-operator-shim",
    "nestor-console",
    "storage-infra",
    "kubectl-nestor",
];

/// The help of a program or subcommand.
struct Help {
    words: Vec<String>,
    text: String,
}

/// The page, from the programs in a folder.
pub async fn page(binaries: &Path) -> Result<Generated> {
    let mut text = new_page("Flags", "the help of the programs");
    paragraph(
        &mut text,
        "What `--help` prints; a subcommand refers to groups of flags that are printed above. [Components](components.md) explains rules that all programs share, such as environment variables \
         and durations, and how components belong together.",
    );
    for program in PROGRAMS {
        // Users run kubectl's plugin as a subcommand of kubectl.
        let name = program.replace("kubectl-", "kubectl ");
        sections(&mut text, of_program(&binaries.join(program), name).await?);
    }
    sections(&mut text, of_lab());
    Ok(Generated::page("flags", text))
}

/// The sections of a program and its subcommands.
fn sections(page: &mut String, all: Vec<Help>) {
    let mut printed = BTreeMap::new();
    for Help { words, text } in all {
        let (level, name) = (if words.len() == 1 { "##" } else { "###" }, words.join(" "));
        let text = without_repetitions(&text, &name, &mut printed);
        page.push_str(&format!("\n{level} {name}\n\n```text\n{text}\n```\n"));
    }
}

/// The help of a command, without the groups of flags that an earlier command of the program has printed.
fn without_repetitions(help: &str, command: &str, printed: &mut BTreeMap<String, String>) -> String {
    let shortened = help.split("\n\n").map(|block| {
        let Some((heading, _)) = block.split_once(":\n").filter(|(heading, _)| !heading.contains('\n'))
        else {
            return block.to_owned();
        };
        match printed.entry(block.to_owned()) {
            Entry::Occupied(earlier) => format!("{heading}: as of {}", earlier.get()),
            Entry::Vacant(new) => {
                new.insert(command.to_owned());
                block.to_owned()
            }
        }
    });
    shortened.collect::<Vec<_>>().join("\n\n")
}

/// The help of a program and all of its subcommands.
async fn of_program(path: &Path, name: String) -> Result<Vec<Help>> {
    let mut all = Vec::new();
    let mut waiting = vec![vec![name]];
    while let Some(words) = waiting.pop() {
        let text = help(path, &words[1..]).await?;
        let below = subcommands(&text).into_iter().rev();
        waiting.extend(below.map(|name| [&words[..], &[name]].concat()));
        all.push(Help { words, text });
    }
    Ok(all)
}

/// Runs a program for its help, without variables that would appear in it, and without a terminal, whose width matters.
async fn help(program: &Path, words: &[String]) -> Result<String> {
    let mut help = command(&program.display().to_string(), words);
    help.arg("--help").env_clear().stdin(Stdio::null());
    let text = run(&mut help).await.context("the programs must be built")?;
    Ok(clean(&text))
}

/// The names of the subcommands in a help.
fn subcommands(help: &str) -> Vec<String> {
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    let names = names.filter_map(|line| line.split(' ').next().map(str::to_owned));
    names.filter(|name| name != "help").collect()
}

/// Without blanks at the ends of lines, and without empty lines inside of and between options.
fn clean(help: &str) -> String {
    let mut lines: Vec<&str> = Vec::new();
    for line in help.trim_end().lines().map(str::trim_end) {
        if line.starts_with("  ") && lines.last() == Some(&"") {
            lines.pop();
        }
        lines.push(line);
    }
    lines.join("\n")
}

/// The help of `cargo lab`.
fn of_lab() -> Vec<Help> {
    let mut lab = Cli::command().mut_args(|arg| arg.hide_env_values(true));
    lab.build();
    let own = Help { words: vec!["cargo lab".to_owned()], text: rendered(&lab) };
    let below = lab.get_subcommands().filter(|command| command.get_name() != "help");
    let below = below.map(|command| {
        let words = vec!["cargo lab".to_owned(), command.get_name().to_owned()];
        Help { words, text: rendered(command) }
    });
    [own].into_iter().chain(below).collect()
}

fn rendered(command: &clap::Command) -> String {
    clean(&command.clone().term_width(100).render_long_help().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_lines_remain_between_sections_only() {
        let help = "About.\n\nOptions:\n  -a\n          Text\n          \n          [env: A]\n\n  -b\n\nLogs:\n  -c\n";
        let expected = "About.\n\nOptions:\n  -a\n          Text\n          [env: A]\n  -b\n\nLogs:\n  -c";
        assert_eq!(clean(help), expected);
    }

    #[test]
    fn a_group_of_flags_is_printed_once() {
        let mut printed = BTreeMap::new();
        let logs = "Logs:\n  -l";
        let first = format!("About.\n\nOptions:\n  -a\n\n{logs}");
        assert_eq!(without_repetitions(&first, "one", &mut printed), first);
        let second =
            without_repetitions(&format!("About.\n\nOptions:\n  -b\n\n{logs}"), "one two", &mut printed);
        assert_eq!(second, "About.\n\nOptions:\n  -b\n\nLogs: as of one");
    }

    #[test]
    fn subcommands_are_found_in_a_help() {
        let help = "About.\n\nUsage: a\n\nCommands:\n  one-two  Text\n           more\n  help     Print\n\nOptions:\n  -h";
        assert_eq!(subcommands(help), ["one-two"]);
        assert!(subcommands("Options:\n  -h").is_empty());
    }
}
