//! Drives a server through operations with faults: a crash at a step, another one while the server recovers from the first, or an
//! effect that reports an error.

use std::collections::HashMap;
use std::fs;

use crate::support::*;
use infra_api::{ClientError, PoolName, PoolSpec, ProblemCode};
use test_postgres::Cluster;
use uuid::Uuid;

use super::operations::{Operation, Round};

/// The n-th pass of a fail point.
#[derive(Debug, Clone)]
pub struct Step {
    pub point: String,
    pub time: usize,
}

/// Numbers each pass of a fail point.
pub fn steps(passed: &[String]) -> Vec<Step> {
    let mut times: HashMap<String, usize> = HashMap::new();
    let number = |point: &String| {
        let time = times.entry(point.clone()).or_default();
        *time += 1;
        Step { point: point.clone(), time: *time }
    };
    passed.iter().map(number).collect()
}

/// This many of the items, the same ones for the same seed.
pub fn sample<T>(mut items: Vec<T>, count: usize, seed: u64) -> Vec<T> {
    let mut state = seed;
    let mut chosen = Vec::new();
    while chosen.len() < count && !items.is_empty() {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let index = (mixed ^ (mixed >> 31)) % items.len() as u64;
        chosen.push(items.swap_remove(usize::try_from(index).unwrap()));
    }
    chosen
}

/// Where the catalog is.
enum Catalog {
    Sqlite,
    /// In a database, where a passive server waits for the crash of the active one.
    Database {
        cluster: Cluster,
        url: String,
        standby: Option<Box<Server>>,
        servers: usize,
    },
}

/// A site with two pools and a VM, and its server.
pub struct Driver {
    server: Option<Server>,
    catalog: Catalog,
    site: Site,
    node: Uuid,
    rounds: usize,
    /// Number of crashes so far.
    pub crashes: usize,
}

impl Driver {
    /// A server that is started again after a crash.
    pub async fn new() -> Self {
        Self::over(Catalog::Sqlite).await
    }

    /// Servers on one database: a passive one takes over after a crash.
    pub async fn with_standby() -> Self {
        let cluster = Cluster::start();
        let url = cluster.database();
        Self::over(Catalog::Database { cluster, url, standby: None, servers: 0 }).await
    }

    async fn over(catalog: Catalog) -> Self {
        let mut site = Site::reflink();
        site.mount("far", &["mkfs.ext4", "-q", "-F"]);
        fs::create_dir(site.path("files")).unwrap();
        site.flags = vec!["--file-dir".to_owned(), text(&site.path("files")).to_owned()];
        if let Catalog::Database { url, .. } = &catalog {
            site.flags.extend(["--catalog".to_owned(), url.clone()]);
        }
        let node = Uuid::new_v4();
        let mut driver = Self { server: None, catalog, site, node, rounds: 0, crashes: 0 };
        driver.next_server().await;
        let server = driver.server.take().unwrap();
        driver.site.register(&server, &[node]).await;
        let far = PoolSpec { path: text(&driver.site.path("far")).to_owned(), ..driver.site.pool_spec() };
        server.client.put_pool(&PoolName::new("far").unwrap(), &far).await.unwrap();
        driver.server = Some(server);
        driver
    }

    /// Starts the next server, or lets the passive one take over. False if it crashes before it serves.
    async fn next_server(&mut self) -> bool {
        let Catalog::Database { standby, servers, .. } = &mut self.catalog else {
            self.server = self.site.try_start();
            return self.server.is_some();
        };
        let mut start = || {
            *servers += 1;
            Box::new(self.site.start_with_data(&format!("data{servers}")))
        };
        let mut server = standby.take().unwrap_or_else(&mut start);
        until("the passive server is active", async || server.has_crashed() || is_active(&server).await)
            .await;
        let serves = !server.has_crashed();
        // Only now: of two passive servers, either may take over.
        *standby = serves.then(start);
        self.server = serves.then_some(*server);
        serves
    }

    fn server(&mut self) -> &mut Server {
        self.server.as_mut().unwrap()
    }

    /// Whether the server has no background work left.
    fn is_idle(&self) -> bool {
        match &self.catalog {
            Catalog::Sqlite => is_idle(&self.site),
            Catalog::Database { cluster, url, .. } => cluster.query(url, DUE) == "0",
        }
    }

    /// Waits until the server has no background work left, or has crashed.
    async fn idle(&mut self) {
        until("all records are written", async || self.server().has_crashed() || self.is_idle()).await;
    }

    /// A new round, with the preconditions of its operation.
    async fn prepare(&mut self, operation: Operation) -> Round {
        self.rounds += 1;
        let round = Round::new(self.rounds, &self.site, self.node);
        round.prepare(operation, &self.site, self.server.as_ref().unwrap()).await;
        self.idle().await;
        round
    }

    async fn finish(&mut self, operation: Operation, round: Round) {
        let server = self.server.as_ref().unwrap();
        round.check(operation, &self.site, server).await;
        round.clear(&self.site, server).await;
    }

    /// Sends the request once. None if the server crashes meanwhile.
    async fn act(&mut self, operation: Operation, round: &Round) -> Option<Result<(), ClientError>> {
        let client = self.server().client.clone();
        let crashed = async {
            until_soon(async || self.server().has_crashed()).await;
        };
        tokio::select! {
            biased;
            () = crashed => None,
            result = round.act(operation, &client) => Some(result),
        }
    }

    /// Repeats the request until the operation is done, which recovery may delay, and nothing is left to do. False if the server
    /// crashes meanwhile.
    async fn repeat(&mut self, operation: Operation, round: &Round) -> bool {
        until("the operation is done, or the server crashes", async || {
            match self.act(operation, round).await {
                None | Some(Ok(())) => true,
                Some(Err(error)) => {
                    let waits =
                        matches!(error.code(), Some(ProblemCode::Unavailable | ProblemCode::NotActive));
                    // A write in the background failed, and one of this request was committed with it.
                    let is_requested = error.to_string().contains("requested by a test");
                    // Its connection may end before the process does.
                    assert!(waits || is_requested || error.code().is_none(), "{operation:?}: {error}");
                    false
                }
            }
        })
        .await;
        self.idle().await;
        !self.server().has_crashed()
    }

    /// Starts the server and repeats the request until all is done. False if the server crashes before.
    async fn recover(&mut self, operation: Operation, round: &Round) -> bool {
        self.next_server().await && self.repeat(operation, round).await
    }

    /// The steps of an operation without a fault.
    pub async fn record(&mut self, operation: Operation) -> Vec<Step> {
        let round = self.prepare(operation).await;
        self.site.record_fail_points();
        self.act(operation, &round).await.unwrap().unwrap();
        self.idle().await;
        let passed = self.site.passed_fail_points();
        self.finish(operation, round).await;
        assert!(passed.iter().any(|step| step.starts_with("catalog.")), "{operation:?}: {passed:?}");
        steps(&passed)
    }

    async fn crash_at(&mut self, operation: Operation, step: &Step) -> Round {
        let round = self.prepare(operation).await;
        self.site.arm(&step.point, step.time);
        // The operation may complete before the crash.
        let _ = self.act(operation, &round).await;
        self.server().wait_for_crash().await;
        self.crashes += 1;
        round
    }

    /// Crashes at a step, and recovers. Returns the points that the recovery passes.
    pub async fn crash(&mut self, operation: Operation, step: &Step) -> Vec<String> {
        let round = self.crash_at(operation, step).await;
        self.site.record_fail_points();
        println!("{operation:?} at {step:?}");
        assert!(self.recover(operation, &round).await, "it crashed once more");
        let passed = self.site.passed_fail_points();
        self.finish(operation, round).await;
        passed
    }

    /// Crashes at a step, and again at the n-th point that the recovery passes, and recovers. False if the recovery passes fewer
    /// points this time.
    pub async fn crash_twice(&mut self, operation: Operation, step: &Step, again: usize) -> bool {
        let round = self.crash_at(operation, step).await;
        println!("{operation:?} at {step:?}, and at point {again} of the recovery");
        self.site.arm("*", again);
        let mut recovered = self.recover(operation, &round).await;
        let crashed = !self.site.disarm();
        if crashed {
            // Perhaps after all was done.
            if recovered {
                self.server().wait_for_crash().await;
            }
            self.crashes += 1;
            recovered = self.recover(operation, &round).await;
        }
        assert!(recovered);
        self.finish(operation, round).await;
        crashed
    }

    /// An effect or a commit reports an error, after it was done or without being done, and the request is repeated.
    pub async fn fail(&mut self, operation: Operation, write: &Step, how: &str) {
        let round = self.prepare(operation).await;
        let point = format!("{}.{how}", write.point);
        println!("{operation:?}: an error of {point}, pass {}", write.time);
        self.site.fail(&point, write.time);
        let first = self.act(operation, &round).await;
        assert!(self.repeat(operation, &round).await, "it crashed");
        assert!(!self.site.still_fails(), "{point} was not passed; the request ended with {first:?}");
        self.finish(operation, round).await;
    }
}

/// It may crash meanwhile.
async fn is_active(server: &Server) -> bool {
    server.client.list_pools().await.is_ok()
}

/// Waits for a crash. Without a limit of its own: what waits beside it has one.
async fn until_soon(mut so: impl AsyncFnMut() -> bool) {
    while !so().await {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}
