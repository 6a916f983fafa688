//! A Unix socket between a server and its database, that can be cut: then nothing passes, and nobody is told.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The socket's directory, and whether it is cut.
pub struct Relay {
    dir: tempfile::TempDir,
    cut: Arc<AtomicBool>,
}

impl Relay {
    /// Forwards to the database server whose socket is in this directory.
    pub fn to(directory: &Path) -> Self {
        let (dir, cut) = (tempfile::tempdir().unwrap(), Arc::new(AtomicBool::new(false)));
        let name = ".s.PGSQL.5432";
        let (listener, target) = (UnixListener::bind(dir.path().join(name)).unwrap(), directory.join(name));
        let is_cut = cut.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (is_cut, target) = (is_cut.clone(), target.clone());
                std::thread::spawn(move || forward(&client, &target, &is_cut));
            }
        });
        Self { dir, cut }
    }

    /// URL of a database through this relay.
    pub fn url(&self, direct: &str, directory: &Path) -> String {
        direct.replace(&directory.display().to_string(), &self.dir.path().display().to_string())
    }

    /// From now on, nothing passes.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::SeqCst);
    }
}

fn forward(client: &UnixStream, target: &PathBuf, cut: &Arc<AtomicBool>) {
    wait_while_cut(cut);
    let Ok(server) = UnixStream::connect(target) else { return };
    let pairs = [(client, &server), (&server, client)];
    std::thread::scope(|scope| {
        for (from, to) in pairs {
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            scope.spawn(move || pass(from, to, cut));
        }
    });
}

/// Copies bytes until the end of either stream.
fn pass(mut from: UnixStream, mut to: UnixStream, cut: &AtomicBool) {
    let mut bytes = [0; 1 << 16];
    while let Ok(length @ 1..) = from.read(&mut bytes) {
        wait_while_cut(cut);
        if to.write_all(&bytes[..length]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}

fn wait_while_cut(cut: &AtomicBool) {
    while cut.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(20));
    }
}
