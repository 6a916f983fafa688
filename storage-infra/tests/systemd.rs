//! Messages to systemd: the server says when it is ready, reloads and stops, and pings only while its catalog answers.

use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::*;

/// The watchdog's timeout; three pings are sent in this time.
const WATCHDOG: Duration = Duration::from_millis(600);
/// Without a ping in this time, the pings have stopped.
const SILENCE: Duration = Duration::from_secs(2);

/// The receiver of the server's messages, in place of systemd.
struct Systemd(UnixDatagram);

impl Systemd {
    fn listen(site: &mut Site) -> Self {
        let socket = site.path("notify");
        let receiver = UnixDatagram::bind(&socket).unwrap();
        site.env = vec![
            ("NOTIFY_SOCKET", text(&socket).to_owned()),
            ("WATCHDOG_USEC", WATCHDOG.as_micros().to_string()),
        ];
        Self(receiver)
    }

    /// The next message, unless none comes in time.
    fn next(&self, timeout: Duration) -> Option<String> {
        self.0.set_read_timeout(Some(timeout)).unwrap();
        let mut bytes = [0; 4096];
        let length = self.0.recv(&mut bytes).ok()?;
        Some(String::from_utf8(bytes[..length].to_vec()).unwrap())
    }

    /// Waits for a message with this line, and returns it.
    fn says(&self, line: &str) -> String {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(message) =
                self.next(PATIENCE).filter(|message| message.lines().any(|one| one == line))
            {
                return message;
            }
        }
        panic!("the server did not say {line}");
    }

    /// Waits until the server is silent.
    fn is_silent(&self) {
        let start = Instant::now();
        while self.next(SILENCE).is_some() {
            assert!(start.elapsed() < PATIENCE, "the server does not stop its pings");
        }
    }
}

fn signal(server: &Server, name: &str) {
    assert!(Command::new("kill").args([name, &server.pid().to_string()]).status().unwrap().success());
}

#[tokio::test]
async fn the_server_tells_systemd_its_state() {
    let mut site = Site::new();
    let systemd = Systemd::listen(&mut site);
    let server = site.ready(&[]).await;
    let ready = systemd.says("READY=1");
    assert!(ready.contains(&format!("STATUS=serving the API on {}", server.api)), "{ready}");
    for _ in 0..3 {
        systemd.says("WATCHDOG=1");
    }
    signal(&server, "-HUP");
    assert!(systemd.says("RELOADING=1").contains("MONOTONIC_USEC="));
    systemd.says("READY=1");
    assert!(server.client.health().await.unwrap().healthy);
    assert_eq!(server.stop(), Some(0));
    systemd.says("STOPPING=1");
}

#[tokio::test]
async fn the_watchdog_is_silent_while_the_catalog_does_not_answer() {
    let mut site = Site::new();
    let systemd = Systemd::listen(&mut site);
    let server = site.ready(&[]).await;
    systemd.says("WATCHDOG=1");
    // A writer that does not end, as on a stalled disk: each write waits for 5 s.
    let catalog = site.catalog();
    catalog.execute_batch("BEGIN IMMEDIATE").unwrap();
    systemd.is_silent();
    until("the server has logged why", async || {
        !server
            .logged(|event| event["message"].as_str().unwrap().contains("the catalog does not answer"))
            .is_empty()
    })
    .await;
    catalog.execute_batch("ROLLBACK").unwrap();
    for _ in 0..3 {
        systemd.says("WATCHDOG=1");
    }
    assert_eq!(server.stop(), Some(0));
}
