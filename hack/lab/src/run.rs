//! Run folder: the files, processes and state of one lab.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::process::{Process, spawn, tail};
use crate::state::{Component, State};
use crate::wait::until;

/// How long a component may take to become ready on a busy host.
const PATIENCE: Duration = Duration::from_secs(180);

/// Result of waiting for a component.
enum Outcome {
    Ready,
    /// Its process has exited.
    Exited,
}

/// A run folder. Cheap to clone; all state is on disk, guarded by a file lock.
#[derive(Debug, Clone)]
pub struct Run {
    dir: PathBuf,
}

impl Run {
    /// The run in a folder, which need not exist.
    pub fn at(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// The run with a name, in the target folder.
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

    /// The name of the folder, which is the name of the lab.
    pub fn name(&self) -> String {
        self.dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// A path in the folder.
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        self.dir.join(inside)
    }

    /// The log of a component.
    pub fn log(&self, component: &str) -> PathBuf {
        self.path("logs").join(format!("{component}.log"))
    }

    /// File with the fail points at which a component dies: see the crate `fail_point`.
    pub fn fail_points(&self, component: &str) -> PathBuf {
        self.path("fail-points").join(component)
    }

    fn pid_file(&self, component: &str) -> PathBuf {
        self.path("pids").join(component)
    }

    /// Folder for the sockets of this run, with a short and stable path.
    pub fn socket_dir(&self) -> PathBuf {
        let hash = Sha256::digest(self.dir.to_string_lossy().as_bytes());
        let short: String = hash.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        PathBuf::from(format!("/run/nestor-lab-{short}"))
    }

    /// Whether the run has state, so that there is something to take down.
    pub fn exists(&self) -> bool {
        self.path("state.json").exists()
    }

    /// The current state.
    pub fn state(&self) -> Result<State> {
        let path = self.path("state.json");
        let text = fs::read_to_string(&path).with_context(|| {
            format!("no lab at {} (cannot read state.json): `cargo lab up` starts one", self.dir.display())
        })?;
        serde_json::from_str(&text).with_context(|| format!("{} is not a valid state file", path.display()))
    }

    /// Changes the state atomically.
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

    // ---- components ----

    /// The process of a component, running or not.
    pub fn process(&self, component: &str) -> Option<Process> {
        Process::from_pid_file(&self.pid_file(component))
    }

    /// Records a new component, starts it and waits until it is ready.
    pub async fn launch(&self, name: &str, component: Component) -> Result<()> {
        self.update(|state| state.components.insert(name.to_owned(), component))?;
        self.start(name).await
    }

    /// Records a changed component without starting it.
    pub fn record(&self, name: &str, component: Component) -> Result<()> {
        self.update(|state| state.components.insert(name.to_owned(), component)).map(drop)
    }

    /// Starts a recorded component and waits until it is ready. Does nothing if it runs. A sidecar that exits before it is
    /// ready, because it lost its driver, is started again, as kubelet would.
    pub async fn start(&self, name: &str) -> Result<()> {
        let component = self.component(name)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            if !self.process(name).is_some_and(|process| process.alive()) {
                self.clear_sockets(&component);
                let mut env = component.env.clone();
                // Only builds with debug assertions read it.
                env.insert(
                    fail_point::DIRECTORY_VAR.to_owned(),
                    self.fail_points(name).display().to_string(),
                );
                spawn(&component.argv, &env, &self.dir, &self.log(name), &self.pid_file(name))?;
            }
            match self.wait_ready(name, &component, deadline).await? {
                Outcome::Ready => return Ok(()),
                Outcome::Exited if component.driver.is_some() && Instant::now() < deadline => {}
                Outcome::Exited => bail!(self.explain(name, "it exited")),
            }
        }
    }

    /// Removes sockets of a killed process, which would accept no connections.
    fn clear_sockets(&self, component: &Component) {
        for socket in component.ready.sockets() {
            let _ = fs::remove_file(socket);
        }
    }

    async fn wait_ready(&self, name: &str, component: &Component, deadline: Instant) -> Result<Outcome> {
        let pid_file = self.pid_file(name);
        let process = until(PATIENCE, || Process::from_pid_file(&pid_file)).await.with_context(|| {
            let recorded = fs::read_to_string(&pid_file);
            self.explain(name, &format!("it did not start within {PATIENCE:?}; PID file: {recorded:?}"))
        })?;
        loop {
            let reason = match component.ready.check().await {
                Ok(()) => return Ok(Outcome::Ready),
                Err(reason) => reason,
            };
            if !process.alive() {
                return Ok(Outcome::Exited);
            }
            if Instant::now() > deadline {
                bail!(self.explain(name, &format!("not ready within {PATIENCE:?}: {reason}")));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// An error message for a component: what failed, and the end of its log.
    pub fn explain(&self, component: &str, what: &str) -> String {
        let log = self.log(component);
        format!("component {component}: {what}\n--- last lines of {} ---\n{}", log.display(), tail(&log, 20))
    }

    /// Stops a component: SIGTERM, then SIGKILL. Does nothing if it does not run.
    pub async fn stop(&self, name: &str) -> Result<()> {
        let component = self.component(name)?;
        self.stop_process(name, Duration::from_secs(component.grace)).await
    }

    /// Kills a component at once, like a crash.
    pub async fn kill(&self, name: &str) -> Result<()> {
        self.component(name)?;
        self.stop_process(name, Duration::ZERO).await
    }

    async fn stop_process(&self, name: &str, grace: Duration) -> Result<()> {
        match self.process(name) {
            Some(process) => {
                process.stop(grace).await.with_context(|| format!("cannot stop component {name}"))
            }
            None => Ok(()),
        }
    }

    fn component(&self, name: &str) -> Result<Component> {
        let mut state = self.state()?;
        state.components.remove(name).with_context(|| {
            let known: Vec<&str> = state.components.keys().map(String::as_str).collect();
            format!("the lab has no component {name:?}; it has: {}", known.join(", "))
        })
    }

    /// Removes the record of a stopped component.
    pub fn forget(&self, name: &str) -> Result<()> {
        self.update(|state| state.components.remove(name))?;
        let _ = fs::remove_file(self.pid_file(name));
        Ok(())
    }
}

/// Takes an exclusive lock on a file, held until the result is dropped.
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

/// Cargo's target folder, which contains this program (`<target>/<profile>/lab`).
pub fn target_dir() -> Result<PathBuf> {
    let exe = std::env::current_exe().context("cannot find the path of this program")?;
    let folder = exe.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists());
    folder.map(Path::to_owned).with_context(|| {
        format!("{} is not in a cargo target folder: run it with `cargo lab`", exe.display())
    })
}

/// The root of the repository.
pub fn repository() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.ancestors().nth(2).unwrap_or(crate_dir).to_owned()
}
