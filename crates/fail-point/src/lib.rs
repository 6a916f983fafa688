//! Fail points: named points before and after each write, at which a test kills or freezes the process, or makes the write
//! report an error.
//!
//! Only in builds with debug assertions, and only if the environment variable [`DIRECTORY_VAR`] names a directory. Files in it
//! control the fail points, and may be created and deleted while the process runs:
//!
//! | File | Effect |
//! | --- | --- |
//! | `passed` | If it exists, the name of each passed fail point is appended as a line |
//! | `armed` | Contains `<point>` or `<point> <n>`: the process deletes the file and aborts at the (n-th) pass of that point |
//! | `panic` | Like `armed`, but the task panics |
//! | `freeze` | Like `armed`, but the process stops itself (SIGSTOP) until it receives SIGCONT |
//! | `fail` | Contains `<write>.undone` or `<write>.done`, and optionally n: the n-th such write is left undone, or done, and reports an error |
//!
//! The point `*` is every point: `armed` with `* 7` aborts at the seventh point from then on.
//!
//! Each process needs its own directory. A test that runs a server on one thread can also set a hook for that thread, which is
//! called at each pass: see [`set_hook`].

use std::future::Future;

/// Environment variable with the directory.
pub const DIRECTORY_VAR: &str = "NESTOR_FAIL_POINTS";

/// Passes a fail point. `name` is called only if fail points are active.
#[inline]
pub fn pass(name: impl FnOnce() -> String) {
    #[cfg(debug_assertions)]
    if points::is_active() {
        points::pass(&name());
    }
    #[cfg(not(debug_assertions))]
    drop(name);
}

/// Calls `work` between the fail points `<name>.before` and `<name>.after`. `name` is called only if fail points are active; it
/// returns None for work that writes nothing.
#[inline]
pub fn around<T>(name: impl FnOnce() -> Option<String>, work: impl FnOnce() -> T) -> T {
    #[cfg(debug_assertions)]
    if let Some(name) = points::is_active().then(name).flatten() {
        pass(|| format!("{name}.before"));
        let outcome = work();
        pass(|| format!("{name}.after"));
        return outcome;
    }
    #[cfg(not(debug_assertions))]
    drop(name);
    work()
}

/// Like [`around`], for work that can fail: a test can make it report an `error`, with its effect or without.
#[inline]
pub fn effect<T, E>(
    name: impl FnOnce() -> Option<String>,
    error: impl FnOnce(String) -> E,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    #[cfg(debug_assertions)]
    if let Some(name) = points::is_active().then(name).flatten() {
        return match before(&name) {
            Some(why) => Err(error(why)),
            None => after(&name, error, work()),
        };
    }
    #[cfg(not(debug_assertions))]
    drop((name, error));
    work()
}

/// Async variant of [`effect`].
#[cfg(debug_assertions)]
pub async fn effect_async<T, E>(
    name: impl FnOnce() -> Option<String>,
    error: impl FnOnce(String) -> E,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let Some(name) = points::is_active().then(name).flatten() else { return work.await };
    match before(&name) {
        Some(why) => Err(error(why)),
        None => after(&name, error, work.await),
    }
}

/// Async variant of [`effect`].
#[cfg(not(debug_assertions))]
#[inline]
pub fn effect_async<T, E, F: Future<Output = Result<T, E>>>(
    name: impl FnOnce() -> Option<String>,
    error: impl FnOnce(String) -> E,
    work: F,
) -> F {
    drop((name, error));
    work
}

/// Whether a write must report an error now: `<write>.undone` before it, `<write>.done` after it. `name` is called only if fail
/// points are active.
#[inline]
pub fn must_fail(name: impl FnOnce() -> String) -> bool {
    #[cfg(debug_assertions)]
    if let Some(points) = points::active() {
        return points.is_requested("fail", &name());
    }
    #[cfg(not(debug_assertions))]
    drop(name);
    false
}

/// Passes the point before a write. Returns why the write must be left undone, if it must.
#[cfg(debug_assertions)]
fn before(name: &str) -> Option<String> {
    pass(|| format!("{name}.before"));
    let undone = format!("{name}.undone");
    must_fail(|| undone.clone()).then(|| format!("fail point {undone}"))
}

/// Passes the point after a write. Returns an error instead of its success, if it must.
#[cfg(debug_assertions)]
fn after<T, E>(name: &str, error: impl FnOnce(String) -> E, outcome: Result<T, E>) -> Result<T, E> {
    pass(|| format!("{name}.after"));
    let done = format!("{name}.done");
    if must_fail(|| done.clone()) {
        outcome.and_then(|_| Err(error(format!("fail point {done}"))))
    } else {
        outcome
    }
}

/// Async variant of [`around`].
#[cfg(debug_assertions)]
pub async fn around_async<F: Future>(name: impl FnOnce() -> Option<String>, work: F) -> F::Output {
    let Some(name) = points::is_active().then(name).flatten() else { return work.await };
    pass(|| format!("{name}.before"));
    let outcome = work.await;
    pass(|| format!("{name}.after"));
    outcome
}

/// Async variant of [`around`].
#[cfg(not(debug_assertions))]
#[inline]
pub fn around_async<F: Future>(name: impl FnOnce() -> Option<String>, work: F) -> F {
    drop(name);
    work
}

/// What is called with the name of a fail point.
pub type Hook = std::rc::Rc<dyn Fn(&str)>;

/// Calls this at each pass of a fail point on this thread from now on, with the name of the point; `None` ends that. It may
/// unwind, and so end the task that passes the point.
pub fn set_hook(hook: Option<Hook>) {
    #[cfg(debug_assertions)]
    points::set_hook(hook);
    #[cfg(not(debug_assertions))]
    drop(hook);
}

/// Source location of a closure of this type: `<module>.<function>`.
pub fn function_of<F>() -> String {
    function(std::any::type_name::<F>())
}

/// Parses the type name of a closure, such as `krate::module::<impl krate::Type>::function::{{closure}}` or
/// `krate::module::Type::function::{{closure}}`.
fn function(closure: &str) -> String {
    let function = closure.trim_end_matches("::{{closure}}");
    let (before, name) = function.rsplit_once("::").unwrap_or(("", function));
    let module = before.split("::<impl").next().unwrap_or_default();
    let is_module = |segment: &&str| segment.starts_with(|c: char| c.is_ascii_lowercase());
    let module = module.rsplit("::").find(is_module).unwrap_or_default();
    format!("{module}.{name}")
}

#[cfg(debug_assertions)]
mod points {
    use std::cell::RefCell;
    use std::fs::{self, File};
    use std::io::Write;
    use std::path::PathBuf;
    use std::sync::{Mutex, OnceLock, PoisonError};

    use super::Hook;

    /// Stands for every point.
    const EVERY: &str = "*";

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    pub(super) fn set_hook(hook: Option<Hook>) {
        HOOK.set(hook);
    }

    /// The hook of this thread.
    fn hook() -> Option<Hook> {
        HOOK.with_borrow(Option::clone)
    }

    /// Whether anybody wants to know of passes on this thread.
    pub(super) fn is_active() -> bool {
        HOOK.with_borrow(Option::is_some) || active().is_some()
    }

    /// Passes a point.
    pub(super) fn pass(point: &str) {
        if let Some(hook) = hook() {
            hook(point);
        }
        if let Some(points) = active() {
            points.pass(point);
        }
    }

    /// Fail points controlled by a directory.
    pub(super) struct Points {
        dir: PathBuf,
        /// Serializes updates of the counts in the files.
        updating: Mutex<()>,
    }

    /// Fail points of this process, if active.
    pub(super) fn active() -> Option<&'static Points> {
        static ACTIVE: OnceLock<Option<Points>> = OnceLock::new();
        ACTIVE
            .get_or_init(|| std::env::var_os(super::DIRECTORY_VAR).map(|dir| Points::of(dir.into())))
            .as_ref()
    }

    impl Points {
        pub(super) fn of(dir: PathBuf) -> Self {
            Self { dir, updating: Mutex::default() }
        }

        pub(super) fn pass(&self, point: &str) {
            // The file is not created. A single write keeps lines of several threads intact.
            if let Ok(mut passed) = File::options().append(true).open(self.dir.join("passed")) {
                let _ = passed.write_all(format!("{point}\n").as_bytes());
            }
            if self.is_requested("armed", point) {
                eprintln!("fail point {point}: aborting");
                std::process::abort();
            }
            assert!(!self.is_requested("panic", point), "fail point {point}");
            if self.is_requested("freeze", point) {
                eprintln!("fail point {point}: stopping until SIGCONT");
                // Signal this thread: a signal to the process may be delivered to another thread first, while this one continues.
                // A failure is impossible.
                let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP);
            }
        }

        /// Whether a file requests an action at this pass. Returns true once.
        pub(super) fn is_requested(&self, file: &str, point: &str) -> bool {
            let _one = self.updating.lock().unwrap_or_else(PoisonError::into_inner);
            let file = self.dir.join(file);
            let Ok(text) = fs::read_to_string(&file) else { return false };
            let mut words = text.split_whitespace();
            let requested = words.next().unwrap_or_default();
            if requested != point && requested != EVERY {
                return false;
            }
            match words.next().and_then(|count| count.parse::<u64>().ok()) {
                Some(count @ 2..) => {
                    let _ = fs::write(&file, format!("{requested} {}", count - 1));
                    false
                }
                // If the file cannot be deleted, the process would abort again and again.
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
    fn an_armed_point_is_fatal_once_at_the_requested_pass() {
        let dir = tempfile::tempdir().unwrap();
        let points = Points::of(dir.path().to_owned());
        let armed = dir.path().join("armed");
        let is_fatal = |point| points.is_requested("armed", point);
        assert!(!is_fatal("a.before"));
        fs::write(&armed, "a.before\n").unwrap();
        assert!(!points.is_requested("freeze", "a.before"));
        assert!(!is_fatal("a.after") && !is_fatal("a.before.b"));
        assert!(is_fatal("a.before") && !is_fatal("a.before"));
        assert!(!armed.exists());
        fs::write(&armed, "a.before 3").unwrap();
        assert!(!is_fatal("a.before") && !is_fatal("a.before"));
        assert!(is_fatal("a.before"));
        fs::write(&armed, "* 3").unwrap();
        assert!(!is_fatal("a.before") && !is_fatal("b.after"));
        assert!(is_fatal("c.before") && !is_fatal("d.before"));
    }

    /// Runs itself in a process whose writes must report errors.
    #[test]
    fn a_write_reports_an_error_with_its_effect_or_without() {
        if std::env::var_os(super::DIRECTORY_VAR).is_some() {
            let mut effects = 0;
            let mut write = || {
                super::effect(
                    || Some("write".to_owned()),
                    |why| why,
                    || {
                        effects += 1;
                        Ok(effects)
                    },
                )
            };
            let outcomes = [write(), write(), write(), write()];
            let failed = |why: &str| Err(format!("fail point write.{why}"));
            assert_eq!(outcomes, [Ok(1), failed("undone"), Ok(2), Ok(3)]);
            let dir = std::env::var(super::DIRECTORY_VAR).unwrap();
            fs::write(std::path::Path::new(&dir).join("fail"), "write.done").unwrap();
            assert_eq!([write(), write()], [failed("done"), Ok(5)]);
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("fail"), "write.undone 2").unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tests::a_write_reports_an_error_with_its_effect_or_without"]);
        let output = command.env(super::DIRECTORY_VAR, dir.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(!dir.path().join("fail").exists());
    }

    #[test]
    fn a_hook_is_called_at_each_pass_on_its_thread_and_can_end_it() {
        use std::cell::RefCell;
        use std::rc::Rc;
        let seen = Rc::new(RefCell::new(Vec::new()));
        let passed = seen.clone();
        super::set_hook(Some(Rc::new(move |point| {
            passed.borrow_mut().push(point.to_owned());
            if point == "b.after" {
                std::panic::resume_unwind(Box::new(()));
            }
        })));
        super::around(|| Some("a".to_owned()), || ());
        std::thread::spawn(|| super::pass(|| "elsewhere".to_owned())).join().unwrap();
        let ended = std::panic::catch_unwind(|| super::around(|| Some("b".to_owned()), || ()));
        super::set_hook(None);
        super::pass(|| "later".to_owned());
        assert!(ended.is_err());
        assert_eq!(*seen.borrow(), ["a.before", "a.after", "b.before", "b.after"]);
    }

    #[test]
    fn a_closure_is_named_after_its_function() {
        fn function_of<F>(_closure: F) -> String {
            super::function_of::<F>()
        }
        assert_eq!(function_of(|| ()), "tests.a_closure_is_named_after_its_function");
        let method = "a::volumes::<impl a::Service>::grow::{{closure}}::{{closure}}";
        assert_eq!(super::function(method), "volumes.grow");
        assert_eq!(super::function("a::volumes::Volumes::grow::{{closure}}"), "volumes.grow");
    }

    #[test]
    fn passes_are_recorded_only_if_the_file_exists() {
        let dir = tempfile::tempdir().unwrap();
        let points = Points::of(dir.path().to_owned());
        let passed = dir.path().join("passed");
        points.pass("unseen");
        assert!(!passed.exists());
        fs::write(&passed, "").unwrap();
        points.pass("first");
        points.pass("second");
        assert_eq!(fs::read_to_string(&passed).unwrap(), "first\nsecond\n");
    }

    /// Runs itself in a process with an armed fail point.
    #[test]
    fn a_process_aborts_at_its_armed_fail_point() {
        use std::os::unix::process::ExitStatusExt;
        if std::env::var_os(super::DIRECTORY_VAR).is_some() {
            super::around(|| Some("here".to_owned()), || ());
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (armed, passed) = (dir.path().join("armed"), dir.path().join("passed"));
        fs::write(&armed, "here.after").unwrap();
        fs::write(&passed, "").unwrap();
        let run = || {
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "tests::a_process_aborts_at_its_armed_fail_point"]);
            command.env(super::DIRECTORY_VAR, dir.path()).output().unwrap().status
        };
        // SIGABRT.
        assert_eq!(run().signal(), Some(6));
        assert_eq!(fs::read_to_string(&passed).unwrap(), "here.before\nhere.after\n");
        assert!(run().success(), "it aborted twice");
    }
}
