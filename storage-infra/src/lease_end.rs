//! Ends the process of a server whose lease is over: its locks of pools end with it, so that the next active server can use them.
//!
//! A thread of its own watches the lease, and kills the process: whatever else hangs, the process ends.

use std::io;
use std::sync::mpsc::channel;
use std::time::Duration;

use nix::sys::signal::{Signal, raise};

use crate::lease::{Lease, clock};

/// How long a server lives without its lease: until it has answered its clients, or reaches its database again.
pub const GRACE: Duration = Duration::from_secs(3);
/// Time between looks at the lease.
const LOOK: Duration = Duration::from_millis(100);
/// How long the end waits for its line in the log.
const LOG: Duration = Duration::from_millis(200);

/// Since when the lease is seen to be over.
#[derive(Debug, Default)]
struct Over(Option<Duration>);

impl Over {
    /// Whether the server must end, at a look at this time.
    fn is_due(&mut self, is_valid: bool, now: Duration) -> bool {
        if is_valid {
            self.0 = None;
            return false;
        }
        now >= *self.0.get_or_insert(now) + GRACE
    }
}

/// Watches the lease until the end of the process.
pub fn watch(lease: Lease) -> io::Result<()> {
    let watch = move || {
        let mut over = Over::default();
        while !over.is_due(lease.check().is_ok(), clock()) {
            std::thread::sleep(LOOK);
        }
        end();
    };
    std::thread::Builder::new().name("lease-end".to_owned()).spawn(watch).map(drop)
}

fn end() {
    let (written, log) = channel();
    // The log may hang, too.
    let write = move || {
        tracing::error!(
            "the lease of this server has been over for {GRACE:?}: it ends, so that another one can use the pools; start it again \
             as a passive server"
        );
        written.send(())
    };
    if std::thread::Builder::new().spawn(write).is_ok() {
        // An error means that it hangs.
        let _ = log.recv_timeout(LOG);
    }
    // Handlers of a usual exit may wait for what hangs. The signal cannot be blocked.
    let _ = raise(Signal::SIGKILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_ends_when_it_was_without_its_lease_for_the_whole_time() {
        let (mut over, second) = (Over::default(), Duration::from_secs(1));
        assert!(!over.is_due(true, second));
        assert!(!over.is_due(false, 2 * second));
        assert!(!over.is_due(false, 4 * second));
        assert!(!over.is_due(true, 5 * second), "it was renewed");
        assert!(!over.is_due(false, 6 * second));
        assert!(!over.is_due(false, 8 * second));
        assert!(over.is_due(false, 9 * second));
    }

    #[test]
    fn a_server_that_was_stopped_learns_first_whether_its_lease_is_renewed() {
        let (mut over, hour) = (Over::default(), Duration::from_secs(3600));
        assert!(!over.is_due(true, Duration::ZERO));
        assert!(!over.is_due(false, hour));
    }
}
