//! Progress output: spinners on a terminal, plain lines elsewhere.
//!
//! Progress goes to standard error, results to standard output.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Progress output. Cheap to clone.
#[derive(Clone)]
pub struct Ui {
    start: Instant,
    bars: Option<MultiProgress>,
}

impl Default for Ui {
    fn default() -> Self {
        let bars = std::io::stderr().is_terminal().then(MultiProgress::new);
        Self { start: Instant::now(), bars }
    }
}

impl Ui {
    /// Time since the start of the command.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Prints a line, prefixed with the time since the start of the command.
    pub fn line(&self, text: impl AsRef<str>) {
        let text = format!("{:>7.1}s  {}", self.elapsed().as_secs_f64(), text.as_ref());
        match &self.bars {
            Some(bars) => drop(bars.println(text)),
            None => eprintln!("{text}"),
        }
    }

    /// Starts a step that takes time. Without [`Step::done`] it ends silently: its error is reported elsewhere.
    pub fn step(&self, name: impl Into<String>) -> Step {
        let name = name.into();
        let bar = self.bars.as_ref().map(|bars| {
            let bar = bars.add(ProgressBar::new_spinner());
            if let Ok(style) = ProgressStyle::with_template("{elapsed:>8}  {spinner} {prefix}  {wide_msg}") {
                bar.set_style(style);
            }
            bar.set_prefix(name.clone());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Step { ui: self.clone(), name, bar, start: Instant::now(), last_line: Instant::now() }
    }
}

/// A step in progress.
pub struct Step {
    ui: Ui,
    name: String,
    bar: Option<ProgressBar>,
    start: Instant,
    last_line: Instant,
}

impl Step {
    /// Shows progress. Without a terminal, prints at most one line per 15 seconds.
    pub fn message(&mut self, text: impl AsRef<str>) {
        match &self.bar {
            Some(bar) => bar.set_message(text.as_ref().to_owned()),
            None if self.last_line.elapsed() > Duration::from_secs(15) => {
                self.last_line = Instant::now();
                self.ui.line(format!("{}: {}", self.name, text.as_ref()));
            }
            None => {}
        }
    }

    /// Prints that the step is done.
    pub fn done(self) {
        self.ui.line(format!("{} ({:.1}s)", self.name, self.start.elapsed().as_secs_f64()));
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Prints a line of the result to standard output. Ignores a closed pipe.
pub fn say(text: impl AsRef<str>) {
    let _ = writeln!(std::io::stdout(), "{}", text.as_ref());
}

/// A table with aligned columns, as lines.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> Vec<String> {
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for (cell, width) in cells.zip(&widths) {
            text.push_str(&format!("{cell:<width$}  "));
        }
        text.trim_end().to_owned()
    };
    let mut lines = vec![line(&mut header.iter().copied())];
    lines.extend(rows.iter().map(|row| line(&mut row.iter().map(String::as_str))));
    lines
}
