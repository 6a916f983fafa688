use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

fn queue<K>() -> (Queue<K>, Worker<K>) {
    let queue = Queue::default();
    let worker = queue.worker("test");
    (queue, worker)
}

#[tokio::test(start_paused = true)]
async fn a_failing_key_is_retried_and_repeated_pushes_are_merged() {
    let (queue, worker) = queue::<&'static str>();
    let stop = CancellationToken::new();
    let tries = Arc::new(AtomicU32::new(0));
    for _ in 0..5 {
        queue.push("key");
    }
    let (counted, done) = (tries.clone(), stop.clone());
    worker
        .run(4, Retry::default(), stop, move |_| {
            let tries = counted.fetch_add(1, Ordering::SeqCst) + 1;
            let done = done.clone();
            async move {
                if tries < 3 {
                    return Err("not yet");
                }
                done.cancel();
                Ok(NextAction::AwaitChange)
            }
        })
        .await;
    assert_eq!(tries.load(Ordering::SeqCst), 3);
}

#[tokio::test(start_paused = true)]
async fn keys_with_many_failures_are_retried_now() {
    let (queue, worker) = queue::<&'static str>();
    let stop = CancellationToken::new();
    let tries = Arc::new(AtomicU32::new(0));
    queue.push("key");
    let retry = Retry { first: Duration::from_millis(500), longest: Duration::from_secs(600) };
    let (trying, done) = (tries.clone(), stop.clone());
    let work = tokio::spawn(worker.run(4, retry, stop, move |_| {
        let (tries, done) = (trying.fetch_add(1, Ordering::SeqCst) + 1, done.clone());
        async move {
            if tries <= 10 {
                return Err("the link is down");
            }
            done.cancel();
            Ok(NextAction::AwaitChange)
        }
    }));
    while tries.load(Ordering::SeqCst) < 10 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let started = Instant::now();
    queue.retry_now();
    work.await.unwrap();
    assert!(started.elapsed() <= RETRY_SPREAD, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_busy_flow_does_not_delay_others() {
    let (queue, worker) = queue::<Key>();
    let stop = CancellationToken::new();
    for number in 0..100 {
        queue.push(Key::new("loud", format!("vm-{}.{number}", number % 2)));
    }
    queue.push(Key::new("quiet", "vm.1"));
    let (seen, done) = (Arc::new(Mutex::new(Vec::new())), stop.clone());
    let order = seen.clone();
    let flow = |key: &Key| Key::new(&*key.namespace, key.name.split('.').next().unwrap_or_default());
    let work = move |key: Key| {
        let mut order = order.lock().unwrap();
        order.push(key);
        if order.len() == 101 {
            done.cancel();
        }
        async { Ok::<_, String>(NextAction::AwaitChange) }
    };
    worker.run_fair(1, Retry::default(), stop, flow, work).await;
    let order: Vec<String> = seen.lock().unwrap().iter().take(4).map(Key::to_string).collect();
    assert_eq!(order, ["loud/vm-0.0", "quiet/vm.1", "loud/vm-1.1", "loud/vm-0.2"]);
}

#[tokio::test(start_paused = true)]
async fn paced_keys_wait_for_a_call_and_pushes_meanwhile_are_merged() {
    let (queue, worker) = queue::<u32>();
    let (stop, pace) = (CancellationToken::new(), Pace::default());
    let call = pace.call();
    let worked = Arc::new(Mutex::new(Vec::new()));
    let (log, done, at) = (worked.clone(), stop.clone(), pace.clone());
    let work = tokio::spawn(async move {
        let work = |key| {
            let mut log = log.lock().unwrap();
            log.push(key);
            if log.len() == 2 {
                done.cancel();
            }
            async { Ok::<_, String>(NextAction::AwaitChange) }
        };
        worker.paced(at).run(4, Retry::default(), done.clone(), work).await;
    });
    let started = Instant::now();
    for key in [1, 2, 1, 2] {
        queue.push(key);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(worked.lock().unwrap().is_empty());
    drop(call);
    work.await.unwrap();
    assert_eq!(*worked.lock().unwrap(), [1, 2]);
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn paced_keys_are_processed_within_the_maximum_delay_while_calls_never_pause() {
    let (queue, worker) = queue::<u32>();
    let (stop, pace) = (CancellationToken::new(), Pace::default());
    let (worked, calls) = (Arc::new(AtomicU32::new(0)), pace.clone());
    let calling = tokio::spawn(async move {
        loop {
            let _call = calls.call();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    tokio::task::yield_now().await;
    for key in 0..400 {
        queue.push(key);
    }
    let (counted, done, at, started) = (worked.clone(), stop.clone(), pace.clone(), Instant::now());
    let work = |_| {
        let (counted, done, pace) = (counted.clone(), done.clone(), at.clone());
        async move {
            pace.answered(Duration::from_millis(5));
            if counted.fetch_add(1, Ordering::SeqCst) + 1 == 400 {
                done.cancel();
            }
            Ok::<_, String>(NextAction::AwaitChange)
        }
    };
    worker.paced(pace).run(4, Retry::default(), stop, work).await;
    calling.abort();
    assert_eq!(worked.load(Ordering::SeqCst), 400);
    // Timers have a resolution of one millisecond.
    let longest = crate::pace::MAX_DELAY + Duration::from_millis(10);
    assert!(started.elapsed() <= longest, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_key_is_processed_by_one_task_at_a_time() {
    let (queue, worker) = queue::<u32>();
    let stop = CancellationToken::new();
    let active = Arc::new(AtomicU32::new(0));
    let rounds = Arc::new(AtomicU32::new(0));
    queue.push(1);
    let (stopping, pushing) = (stop.clone(), queue.clone());
    worker
        .run(8, Retry::default(), stop, move |key| {
            let (active, rounds) = (active.clone(), rounds.clone());
            let (stopping, pushing) = (stopping.clone(), pushing.clone());
            async move {
                assert_eq!(active.fetch_add(1, Ordering::SeqCst), 0, "two tasks at the same time");
                pushing.push(key);
                tokio::time::sleep(Duration::from_millis(5)).await;
                active.fetch_sub(1, Ordering::SeqCst);
                if rounds.fetch_add(1, Ordering::SeqCst) == 3 {
                    stopping.cancel();
                }
                Ok::<_, String>(NextAction::AwaitChange)
            }
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_receives_keys_pushed_after_its_creation_until_it_is_replaced() {
    let queue = Queue::default();
    queue.push(1);
    let first = queue.worker("test");
    queue.push(2);
    drop(first);
    queue.push(3);
    let second = queue.worker("test");
    queue.push(4);
    let (stop, seen) = (CancellationToken::new(), Mutex::default());
    let work = |key| {
        let seen: &Mutex<Vec<i32>> = &seen;
        let stop = stop.clone();
        async move {
            seen.lock().unwrap().push(key);
            stop.cancel();
            Ok::<_, String>(NextAction::AwaitChange)
        }
    };
    second.run(1, Retry::default(), stop.clone(), work).await;
    assert_eq!(*seen.lock().unwrap(), [4]);
}

#[tokio::test(start_paused = true)]
async fn delayed_pushes_are_merged_and_processed_in_time() {
    let (queue, worker) = queue::<u32>();
    let stop = CancellationToken::new();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (started, looking, done) = (Instant::now(), seen.clone(), stop.clone());
    let work = tokio::spawn(worker.run(4, Retry::default(), stop, move |key| {
        let (looking, done) = (looking.clone(), done.clone());
        async move {
            let mut seen = looking.lock().unwrap();
            seen.push((key, started.elapsed().as_millis() / 100));
            if seen.len() == 3 {
                done.cancel();
            }
            Ok::<_, String>(NextAction::AwaitChange)
        }
    }));
    let second = Duration::from_secs(1);
    queue.push_after(1, second);
    queue.push_after(2, second);
    queue.push_after(3, 3 * second);
    tokio::time::sleep(second / 2).await;
    // A later delay does not postpone a key, an earlier one brings it forward, and an immediate push replaces the delay.
    queue.push_after(1, second);
    queue.push_after(3, second);
    queue.push(2);
    work.await.unwrap();
    assert_eq!(*seen.lock().unwrap(), [(2, 5), (1, 10), (3, 15)]);
}

#[test]
fn delays_grow_to_the_maximum() {
    let retry = Retry::default();
    assert!(retry.delay(1) <= retry.first);
    assert!(retry.delay(40) <= retry.longest && retry.delay(40) >= retry.longest / 2);
}
