//! Named points at which a test lets a process die or stand still, before and after each write that it makes.
//!
//! Builds without debug assertions have none of this. Elsewhere nothing happens unless [`FOLDER`] names a folder, and
//! then only what the files there ask for, which can come and go while the process runs:
//!
//! | file | what it does |
//! | --- | --- |
//! | `passed` | while it is there, each point that is passed is appended to it, a line each |
//! | `armed` | has `<point>` or `<point> <n>`: the process aborts when it passes that point (for the n-th time), and the file goes first, so that it happens once |
//! | `panic` | the same, but the task panics |
//! | `freeze` | the same, but the process stops itself (SIGSTOP) until somebody lets it go on (SIGCONT) |
//!
//! A process that is one of several must be given a folder of its own.

use std::future::Future;

/// The environment variable with the folder.
pub const FOLDER: &str = "NESTOR_FAIL_POINTS";

/// Passes a point. The name is only made when somebody wants to know it.
#[inline]
pub fn pass(name: impl FnOnce() -> String) {
    #[cfg(debug_assertions)]
    if let Some(points) = points::active() {
        points.pass(&name());
    }
    #[cfg(not(debug_assertions))]
    drop(name);
}

/// Does something between two points: `<name>.before` and, whatever came of it, `<name>.after`. The name is only made
/// when somebody wants to know it; `None` is for what writes nothing.
#[inline]
pub fn around<T>(name: impl FnOnce() -> Option<String>, work: impl FnOnce() -> T) -> T {
    #[cfg(debug_assertions)]
    if let Some(name) = points::active().and_then(|_| name()) {
        pass(|| format!("{name}.before"));
        let outcome = work();
        pass(|| format!("{name}.after"));
        return outcome;
    }
    #[cfg(not(debug_assertions))]
    drop(name);
    work()
}

/// As [`around`], for what is waited for.
#[cfg(debug_assertions)]
pub async fn around_async<F: Future>(name: impl FnOnce() -> Option<String>, work: F) -> F::Output {
    let Some(name) = points::active().and_then(|_| name()) else { return work.await };
    pass(|| format!("{name}.before"));
    let outcome = work.await;
    pass(|| format!("{name}.after"));
    outcome
}

/// As [`around`], for what is waited for.
#[cfg(not(debug_assertions))]
#[inline]
pub fn around_async<F: Future>(name: impl FnOnce() -> Option<String>, work: F) -> F {
    drop(name);
    work
}

/// Where a closure of this type was written: `<module>.<function>`.
pub fn place_of<F>() -> String {
    place(std::any::type_name::<F>())
}

/// The same, of the closure's name, such as `krate::module::<impl krate::Type>::function::{{closure}}`.
fn place(closure: &str) -> String {
    let function = closure.trim_end_matches("::{{closure}}");
    let (before, name) = function.rsplit_once("::").unwrap_or(("", function));
    let module = before.split("::<impl").next().unwrap_or_default();
    let module = module.rsplit("::").next().unwrap_or_default();
    format!("{module}.{name}")
}

#[cfg(debug_assertions)]
mod points {
    use std::fs::{self, File};
    use std::io::Write;
    use std::path::PathBuf;
    use std::sync::{Mutex, OnceLock, PoisonError};

    /// What a folder asks for.
    pub(super) struct Points {
        folder: PathBuf,
        /// One at a time: the count in the file is read and written.
        looking: Mutex<()>,
    }

    /// Those of this process, if it was given a folder.
    pub(super) fn active() -> Option<&'static Points> {
        static ACTIVE: OnceLock<Option<Points>> = OnceLock::new();
        ACTIVE
            .get_or_init(|| std::env::var_os(super::FOLDER).map(|folder| Points::of(folder.into())))
            .as_ref()
    }

    impl Points {
        pub(super) fn of(folder: PathBuf) -> Self {
            Self { folder, looking: Mutex::default() }
        }

        pub(super) fn pass(&self, point: &str) {
            // Not made where it is not there. One write, so that lines of several threads stay whole.
            if let Ok(mut passed) = File::options().append(true).open(self.folder.join("passed")) {
                let _ = passed.write_all(format!("{point}\n").as_bytes());
            }
            if self.is_asked_for("armed", point) {
                eprintln!("fail point {point}: dying");
                std::process::abort();
            }
            assert!(!self.is_asked_for("panic", point), "fail point {point}");
            if self.is_asked_for("freeze", point) {
                eprintln!("fail point {point}: standing still");
                // Sent to this thread: of a signal to the process, another thread may learn first, and this one goes on
                // for a moment. No thread may not send itself a signal.
                let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP);
            }
        }

        /// Whether a file asks for something here. Says so once.
        pub(super) fn is_asked_for(&self, file: &str, point: &str) -> bool {
            let _one = self.looking.lock().unwrap_or_else(PoisonError::into_inner);
            let file = self.folder.join(file);
            let Ok(text) = fs::read_to_string(&file) else { return false };
            let mut words = text.split_whitespace();
            if words.next() != Some(point) {
                return false;
            }
            match words.next().and_then(|count| count.parse::<u64>().ok()) {
                Some(count @ 2..) => {
                    let _ = fs::write(&file, format!("{point} {}", count - 1));
                    false
                }
                // Where it cannot be removed, the process would die again and again.
                _ => fs::remove_file(&file).is_ok(),
            }
        }
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::points::Points;
    use std::fs;

    #[test]
    fn a_point_is_fatal_once_at_the_passing_that_was_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let points = Points::of(folder.path().to_owned());
        let armed = folder.path().join("armed");
        let is_fatal = |point| points.is_asked_for("armed", point);
        assert!(!is_fatal("a.before"));
        fs::write(&armed, "a.before\n").unwrap();
        assert!(!points.is_asked_for("freeze", "a.before"));
        assert!(!is_fatal("a.after") && !is_fatal("a.before.b"));
        assert!(is_fatal("a.before") && !is_fatal("a.before"));
        assert!(!armed.exists());
        fs::write(&armed, "a.before 3").unwrap();
        assert!(!is_fatal("a.before") && !is_fatal("a.before"));
        assert!(is_fatal("a.before"));
    }

    #[test]
    fn a_closure_is_known_by_where_it_was_written() {
        fn place_of<F>(_closure: F) -> String {
            super::place_of::<F>()
        }
        assert_eq!(place_of(|| ()), "tests.a_closure_is_known_by_where_it_was_written");
        let method = "a::volumes::<impl a::Service>::grow::{{closure}}::{{closure}}";
        assert_eq!(super::place(method), "volumes.grow");
    }

    #[test]
    fn what_is_passed_is_recorded_only_while_somebody_wants_to_know() {
        let folder = tempfile::tempdir().unwrap();
        let points = Points::of(folder.path().to_owned());
        let passed = folder.path().join("passed");
        points.pass("unseen");
        assert!(!passed.exists());
        fs::write(&passed, "").unwrap();
        points.pass("first");
        points.pass("second");
        assert_eq!(fs::read_to_string(&passed).unwrap(), "first\nsecond\n");
    }

    /// Runs itself in a process that is told to die.
    #[test]
    fn a_process_dies_where_it_was_told_to() {
        use std::os::unix::process::ExitStatusExt;
        if std::env::var_os(super::FOLDER).is_some() {
            super::around(|| Some("here".to_owned()), || ());
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (armed, passed) = (folder.path().join("armed"), folder.path().join("passed"));
        fs::write(&armed, "here.after").unwrap();
        fs::write(&passed, "").unwrap();
        let run = || {
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "tests::a_process_dies_where_it_was_told_to"]);
            command.env(super::FOLDER, folder.path()).output().unwrap().status
        };
        // SIGABRT.
        assert_eq!(run().signal(), Some(6));
        assert_eq!(fs::read_to_string(&passed).unwrap(), "here.before\nhere.after\n");
        assert!(run().success(), "it dies once");
    }
}
