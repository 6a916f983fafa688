//! Temporary labs: started for some work and always taken down after it.

use anyhow::{Context, Result, anyhow};
use tokio::signal::unix::{SignalKind, signal};

use crate::down::down;
use crate::lab::Lab;
use crate::run::Run;
use crate::ui::Ui;
use crate::up::{UpOptions, up};

/// What to do with the lab after the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    /// Take it down; keep its logs after a failure.
    Down,
    /// Keep it running.
    Keep,
}

/// Starts a lab, runs `work`, and takes the lab down, also after a failure or an interrupt.
pub(crate) async fn with_lab<T, W>(
    ui: &Ui,
    run: &Run,
    options: &UpOptions,
    after: After,
    work: W,
) -> Result<T>
where
    W: AsyncFnOnce(&Lab) -> Result<T>,
{
    let work_in_lab = async {
        up(ui, run, options).await?;
        work(&Lab::open(run.clone())?).await
    };
    // A lab that already exists must not be taken down.
    anyhow::ensure!(
        !run.exists(),
        "a lab already exists at {}: `cargo lab --name {} down` takes it down",
        run.dir().display(),
        run.name()
    );
    let outcome = tokio::select! {
        outcome = work_in_lab => outcome,
        interrupt = interrupted() => Err(interrupt?),
    };
    if after == After::Keep {
        ui.line(format!("the lab keeps running, at {}", run.dir().display()));
        return outcome;
    }
    let failed = outcome.is_err();
    let down = down(ui, run, failed).await;
    if failed {
        ui.line(format!("logs are kept in {}", run.path("logs").display()));
    }
    outcome.and_then(|value| down.map(|()| value))
}

/// Runs `work` in the lab of `run` if it is up, otherwise in a temporary lab with another name.
pub(crate) async fn with_any_lab<T, W>(
    ui: &Ui,
    run: &Run,
    temporary_name: &str,
    options: &UpOptions,
    work: W,
) -> Result<T>
where
    W: AsyncFnOnce(&Lab) -> Result<T>,
{
    if run.exists() {
        return work(&Lab::open(run.clone())?).await;
    }
    with_lab(ui, &Run::named(temporary_name)?, options, After::Down, work).await
}

/// Waits for SIGTERM or SIGINT.
pub(crate) async fn interrupted() -> Result<anyhow::Error> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    tokio::select! { _ = terminate.recv() => {} _ = interrupt.recv() => {} }
    Ok(anyhow!("interrupted"))
}
