//! The run folder: where everything of one lab is, and the one way to change its state.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::process::{Process, spawn, tail};
use crate::state::{Part, State};
use crate::wait::until;

/// How long a part may take to become ready. Machines that also build are slow.
const PATIENCE: Duration = Duration::from_secs(180);

/// What came of waiting for a part.
enum Outcome {
    Ready,
    /// Its process is gone.
    Ended,
}

/// A run folder. Cheap to clone; all state is on disk, guarded by a file lock.
#[derive(Debug, Clone)]
pub struct Run {
    dir: PathBuf,
}

impl Run {
    /// The run at a folder, whether it exists or not.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// The run of a name, beside the other build results.
    pub fn named(name: &str) -> Result<Self> {
        let legal = !name.is_empty()
            && name.len() <= 40
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
        if !legal {
            bail!("lab name {name:?}: 1 to 40 letters, digits and '-' are allowed");
        }
        Ok(Self::at(target_dir()?.join("lab").join(name)))
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A path inside.
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        self.dir.join(inside)
    }

    /// The log of a part.
    pub fn log(&self, part: &str) -> PathBuf {
        self.path("logs").join(format!("{part}.log"))
    }

    /// Where a part is told at which points of its work to die: see the crate `fail_point`.
    pub fn fail_points(&self, part: &str) -> PathBuf {
        self.path("fail-points").join(part)
    }

    fn pid_file(&self, part: &str) -> PathBuf {
        self.path("pids").join(part)
    }

    /// A folder of this run for sockets, with a short path that is the same every time.
    pub fn socket_dir(&self) -> PathBuf {
        let hash = Sha256::digest(self.dir.to_string_lossy().as_bytes());
        let short: String = hash.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        PathBuf::from(format!("/run/nestor-lab-{short}"))
    }

    /// Whether there is anything to take down.
    pub fn exists(&self) -> bool {
        self.path("state.json").exists()
    }

    /// The state as it is now.
    pub fn state(&self) -> Result<State> {
        let path = self.path("state.json");
        let text = fs::read_to_string(&path).with_context(|| {
            format!("no lab at {} (cannot read state.json): `cargo lab up` makes one", self.dir.display())
        })?;
        serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
    }

    /// Changes the state, in one piece: other processes see it as before or as after.
    pub fn update<T>(&self, change: impl FnOnce(&mut State) -> T) -> Result<T> {
        let _lock = lock(&self.path("state.lock"))?;
        let path = self.path("state.json");
        let mut state = if path.exists() { self.state()? } else { State::default() };
        let result = change(&mut state);
        let new = self.path("state.json.new");
        fs::write(&new, serde_json::to_vec_pretty(&state)?)
            .and_then(|()| fs::rename(&new, &path))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(result)
    }

    // ---- parts ----

    /// The process of a part, dead or alive.
    pub fn process(&self, part: &str) -> Option<Process> {
        Process::from_pid_file(&self.pid_file(part))
    }

    /// Records a new part, starts it and waits until it is ready.
    pub async fn launch(&self, name: &str, part: Part) -> Result<()> {
        self.update(|state| state.parts.insert(name.to_owned(), part))?;
        self.start(name).await
    }

    /// Records a changed part without starting it.
    pub fn record(&self, name: &str, part: Part) -> Result<()> {
        self.update(|state| state.parts.insert(name.to_owned(), part)).map(drop)
    }

    /// Starts a recorded part and waits until it is ready. Fine when it runs already. A sidecar that ends before it is
    /// ready, as it does when it loses its driver, begins anew, as its orchestrator would have it.
    pub async fn start(&self, name: &str) -> Result<()> {
        let part = self.part(name)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            if !self.process(name).is_some_and(|process| process.alive()) {
                self.clear_sockets(&part);
                let mut env = part.env.clone();
                // Only builds of our own programs with debug assertions heed it.
                env.insert(
                    fail_point::DIRECTORY_VAR.to_owned(),
                    self.fail_points(name).display().to_string(),
                );
                spawn(&part.argv, &env, &self.dir, &self.log(name), &self.pid_file(name))?;
            }
            match self.wait_ready(name, &part, deadline).await? {
                Outcome::Ready => return Ok(()),
                Outcome::Ended if part.driver.is_some() && Instant::now() < deadline => {}
                Outcome::Ended => bail!(self.explain(name, "it ended")),
            }
        }
    }

    /// A socket left by a killed process would look like one that is not ready yet.
    fn clear_sockets(&self, part: &Part) {
        for socket in part.ready.sockets() {
            let _ = fs::remove_file(socket);
        }
    }

    async fn wait_ready(&self, name: &str, part: &Part, deadline: Instant) -> Result<Outcome> {
        let pid_file = self.pid_file(name);
        let process = until(PATIENCE, || Process::from_pid_file(&pid_file))
            .await
            .with_context(|| self.explain(name, "it did not even start"))?;
        loop {
            let reason = match part.ready.check().await {
                Ok(()) => return Ok(Outcome::Ready),
                Err(reason) => reason,
            };
            if !process.alive() {
                return Ok(Outcome::Ended);
            }
            if Instant::now() > deadline {
                bail!(self.explain(name, &format!("not ready within {PATIENCE:?}: {reason}")));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// An error's text for a part: what happened, the end of its log, and where the rest is.
    pub fn explain(&self, part: &str, what: &str) -> String {
        let log = self.log(part);
        format!("part {part}: {what}\n--- last lines of {} ---\n{}", log.display(), tail(&log, 20))
    }

    /// Stops a part: asks, then kills. Fine when it does not run.
    pub async fn stop(&self, name: &str) -> Result<()> {
        let part = self.part(name)?;
        self.stop_process(name, Duration::from_secs(part.grace)).await
    }

    /// Kills a part at once, as a crash would.
    pub async fn kill(&self, name: &str) -> Result<()> {
        self.part(name)?;
        self.stop_process(name, Duration::ZERO).await
    }

    async fn stop_process(&self, name: &str, grace: Duration) -> Result<()> {
        match self.process(name) {
            Some(process) => process.stop(grace).await.with_context(|| format!("cannot stop part {name}")),
            None => Ok(()),
        }
    }

    fn part(&self, name: &str) -> Result<Part> {
        let mut state = self.state()?;
        state.parts.remove(name).with_context(|| {
            let known: Vec<&str> = state.parts.keys().map(String::as_str).collect();
            format!("no part {name:?} in this lab; it has: {}", known.join(", "))
        })
    }

    /// Removes the record of a part that is stopped.
    pub fn forget(&self, name: &str) -> Result<()> {
        self.update(|state| state.parts.remove(name))?;
        let _ = fs::remove_file(self.pid_file(name));
        Ok(())
    }
}

/// Holds an exclusive lock on a file until the result is dropped.
pub fn lock(path: &Path) -> Result<File> {
    let open = || -> std::io::Result<File> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let file = File::options().create(true).truncate(false).write(true).open(path)?;
        file.lock()?;
        Ok(file)
    };
    open().with_context(|| format!("cannot lock {}", path.display()))
}

/// Cargo's target folder, which holds this very program (`<target>/<profile>/lab`).
pub fn target_dir() -> Result<PathBuf> {
    let exe = std::env::current_exe().context("cannot tell where this program is")?;
    let folder = exe.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists());
    folder
        .map(Path::to_owned)
        .with_context(|| format!("{} is not in a cargo target folder: run it by `cargo lab`", exe.display()))
}

/// The root of the repository.
pub fn repository() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.ancestors().nth(2).unwrap_or(crate_dir).to_owned()
}
