//! When a background write may start. Pure.

use std::time::Duration;

use tokio::time::Instant;

/// Maximum delay of a write, also if calls never pause.
pub const MAX_DELAY: Duration = Duration::from_secs(30);
/// Delay after which writes no longer wait for calls, but start one at a time with pauses: calls that never pause must not
/// make every condition old, and not all writes should start when [`MAX_DELAY`] is over.
const TRICKLE_AFTER: Duration = Duration::from_secs(5);
/// Pause between such writes.
const TRICKLE_PAUSE: Duration = Duration::from_millis(100);
/// How long a call counts as under way. One that takes longer waits for something else, such as a VM that hangs.
const CALL_TIME: Duration = Duration::from_secs(2);
/// Time without calls after which none is expected: sidecars start the next one of a series within a few requests.
const CALM: Duration = Duration::from_millis(250);
/// An answer is slow if it takes this many times the usual time, and more than [`FAST`].
const SLOW_FACTOR: u32 = 3;
/// An answer within this time is never slow.
const FAST: Duration = Duration::from_millis(20);
/// Maximum pause after a slow answer.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// What is under way.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    /// Time since the start of the last call that is under way.
    pub(super) youngest_call: Option<Duration>,
    /// Time since the end of the last call.
    pub(super) since_call: Option<Duration>,
    /// Number of writes under way.
    pub(super) running: usize,
    /// Time since the last answer to a write.
    pub(super) since_answer: Option<Duration>,
    /// Duration of the last answer to a write, if it was slow.
    pub(super) slow_answer: Option<Duration>,
}

/// How long a write has to wait that has waited for `waited`, unless a call ends before. None: it may start.
pub(super) fn delay(load: &Load, waited: Duration) -> Option<Duration> {
    let left = rest(MAX_DELAY, waited)?;
    let for_calls = for_calls(load).and_then(|delay| match rest(TRICKLE_AFTER, waited) {
        Some(until_trickle) => Some(delay.min(until_trickle)),
        None => for_trickle(load),
    });
    for_calls.max(for_server(load)).map(|delay| delay.min(left))
}

/// The delay by calls.
fn for_calls(load: &Load) -> Option<Duration> {
    let under_way = load.youngest_call.and_then(|age| rest(CALL_TIME, age));
    under_way.max(load.since_call.and_then(|since| rest(CALM, since)))
}

/// The delay by other writes, instead of that by calls.
fn for_trickle(load: &Load) -> Option<Duration> {
    match load.running {
        0 => load.since_answer.and_then(|since| rest(TRICKLE_PAUSE, since)),
        _ => Some(TRICKLE_PAUSE),
    }
}

/// The delay by a server that answers slowly: as long as the answer took, so that it is left alone half of the time.
fn for_server(load: &Load) -> Option<Duration> {
    let (pause, since) = load.slow_answer.zip(load.since_answer)?;
    rest(pause.min(MAX_PAUSE), since)
}

/// What is left of a time; None if nothing is.
fn rest(of: Duration, passed: Duration) -> Option<Duration> {
    of.checked_sub(passed).filter(|rest| !rest.is_zero())
}

/// How long a server took to answer writes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Answers {
    usual: Option<Duration>,
    last: Option<(Instant, Duration)>,
}

impl Answers {
    /// Records an answer.
    pub(super) fn record(&mut self, took: Duration, now: Instant) {
        // Follows a faster server at once, and a slower one gradually.
        self.usual = Some(match self.usual {
            Some(usual) if took > usual => usual + (took - usual) / 16,
            _ => took,
        });
        self.last = Some((now, took));
    }

    /// When the last answer arrived, and how long it took.
    pub(super) fn last(&self) -> Option<(Instant, Duration)> {
        self.last
    }

    /// How long the last answer took, if that was slow.
    pub(super) fn slow(&self) -> Option<Duration> {
        let (_, took) = self.last?;
        (took > FAST && took > self.usual? * SLOW_FACTOR).then_some(took)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(number: u64) -> Duration {
        Duration::from_millis(number)
    }

    const IDLE: Load =
        Load { youngest_call: None, since_call: None, running: 0, since_answer: None, slow_answer: None };

    #[test]
    fn a_write_starts_at_once_while_no_call_is_under_way() {
        assert_eq!(delay(&IDLE, Duration::ZERO), None);
        assert_eq!(delay(&Load { since_call: Some(CALM), running: 3, ..IDLE }, Duration::ZERO), None);
    }

    #[test]
    fn a_write_waits_for_a_call_that_started_recently() {
        let during = |age| Load { youngest_call: Some(age), ..IDLE };
        assert_eq!(delay(&during(ms(0)), ms(0)), Some(CALL_TIME));
        assert_eq!(delay(&during(ms(1_900)), ms(0)), Some(ms(100)));
        assert_eq!(delay(&during(CALL_TIME), ms(0)), None, "it waits for something else");
    }

    #[test]
    fn a_write_waits_for_the_next_call_of_a_series() {
        let after = |since| Load { since_call: Some(since), ..IDLE };
        assert_eq!(delay(&after(ms(50)), ms(0)), Some(ms(200)));
        let hanging = Load { youngest_call: Some(ms(60_000)), ..after(ms(50)) };
        assert_eq!(delay(&hanging, ms(0)), Some(ms(200)));
    }

    #[test]
    fn writes_trickle_if_calls_do_not_pause_and_all_start_after_the_maximum() {
        let busy = Load { youngest_call: Some(ms(0)), ..IDLE };
        assert_eq!(delay(&busy, TRICKLE_AFTER - ms(1_000)), Some(ms(1_000)));
        assert_eq!(delay(&busy, TRICKLE_AFTER), None);
        assert_eq!(delay(&Load { running: 1, ..busy }, TRICKLE_AFTER), Some(TRICKLE_PAUSE));
        assert_eq!(delay(&Load { since_answer: Some(ms(30)), ..busy }, TRICKLE_AFTER), Some(ms(70)));
        let all = Load { running: 4, slow_answer: Some(MAX_DELAY), since_answer: Some(ms(0)), ..busy };
        assert_eq!(delay(&all, MAX_DELAY - ms(1)), Some(ms(1)));
        assert_eq!(delay(&all, MAX_DELAY), None);
    }

    #[test]
    fn a_slow_server_is_left_alone_for_as_long_as_its_answer_took() {
        let slow = |took, since| Load { slow_answer: Some(took), since_answer: Some(since), ..IDLE };
        assert_eq!(delay(&slow(ms(300), ms(100)), ms(0)), Some(ms(200)));
        assert_eq!(delay(&slow(ms(300), ms(300)), ms(0)), None);
        assert_eq!(delay(&slow(ms(20_000), ms(0)), ms(0)), Some(MAX_PAUSE));
    }

    #[test]
    fn an_answer_is_slow_compared_with_the_usual_ones() {
        let (mut answers, now) = (Answers::default(), Instant::now());
        let mut slow = |took| {
            answers.record(ms(took), now);
            answers.slow()
        };
        assert_eq!(slow(5), None);
        assert_eq!(slow(18), None, "fast enough in any case");
        assert_eq!(slow(1_000), Some(ms(1_000)), "the server asked to wait for a second");
        assert_eq!(slow(5), None);
        let slowdowns = (0..50).filter(|_| slow(50).is_some()).count();
        assert!((1..50).contains(&slowdowns), "a server that stays slower is the usual one: {slowdowns}");
    }
}
