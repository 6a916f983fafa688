//! The catalog of a simulated server: transactions run on the thread of the simulation, on a connection that outlives the server.

use super::*;
use crate::lease::Lease;
use crate::simulation::Sim;

/// Runs transactions at once.
pub(in crate::catalog) struct Inline {
    connection: Arc<Mutex<Connection>>,
    lease: Lease,
    sim: Arc<Sim>,
}

impl Threads {
    /// No threads: transactions run on the caller's.
    pub(in crate::catalog) fn inline(
        connection: Arc<Mutex<Connection>>,
        lease: Lease,
        sim: Arc<Sim>,
    ) -> Self {
        let (_, ended) = mpsc::channel();
        let inline = Some(Inline { connection, lease, sim });
        Self {
            writes: Queue::new(),
            reads: Queue::new(),
            changes: Arc::default(),
            ended: Mutex::new(ended),
            inline,
        }
    }
}

impl Inline {
    /// Like with PostgreSQL, a server without a lease commits nothing.
    pub(super) async fn write(&self, write: Write, changes: &AtomicU64) {
        self.sim.arrive().await;
        if let Err(error) = self.lease.check() {
            let (answer, _) = (write.work)(Err(error.into()));
            return answer(Err(error.into()));
        }
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        commit_group(&mut connection, VecDeque::from([write]), changes);
    }

    pub(super) async fn read(&self, read: Read) {
        self.sim.arrive().await;
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        run_read(&mut connection, read);
    }
}
