//! When to claim again: as the last claim says, or at the next poll.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::settings::Settings;
use crate::store::Claims;

#[derive(Default)]
pub(super) struct NextClaim {
    /// The last poll delay; `None` after work was found.
    last_delay: Option<Duration>,
    /// When a due job may start, or may be found.
    again_at: Option<Instant>,
    /// Whether a due job may wait for the end of another one.
    pub(super) after_settle: bool,
    /// The database's time of the last claim.
    pub(super) claimed_at: Option<DateTime<Utc>>,
}

impl NextClaim {
    /// Records what a claim of any kind says.
    pub(super) fn record(&mut self, claims: &Claims) {
        self.again_at = claims.again_in.map(|again_in| Instant::now() + again_in);
        self.after_settle = claims.after_settle;
        self.claimed_at = claims.at;
    }

    /// Records that there is work: polls start again with the shortest delay.
    pub(super) fn work_arrived(&mut self) {
        self.last_delay = None;
    }

    /// Whether a due job waits for its time.
    pub(super) fn has_time(&self) -> bool {
        self.again_at.is_some()
    }

    /// When to claim again if nothing else happens. Without work, polls become rarer.
    pub(super) fn at(&mut self, settings: &Settings) -> Instant {
        let delay = match self.last_delay {
            None => settings.poll_interval,
            Some(last) => last.saturating_mul(2).min(settings.max_poll_interval),
        };
        let poll_at = Instant::now() + delay;
        match self.again_at {
            Some(again_at) if again_at < poll_at => again_at,
            _ => {
                self.last_delay = Some(delay);
                poll_at
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn claims(again_in: Option<Duration>) -> Claims {
        Claims { again_in, ..Claims::NONE }
    }

    /// The next claim in milliseconds, about.
    fn next(next: &mut NextClaim) -> u128 {
        let at = next.at(&Settings::default());
        (at.saturating_duration_since(Instant::now()) + 10 * MS).as_millis() / 20 * 20
    }

    #[test]
    fn polls_become_rarer_until_work_arrives() {
        let mut claim = NextClaim::default();
        assert_eq!([next(&mut claim), next(&mut claim), next(&mut claim)], [500, 1000, 2000]);
        assert_eq!(next(&mut claim), 2000);
        claim.work_arrived();
        assert_eq!(next(&mut claim), 500);
    }

    #[test]
    fn a_claim_that_knows_when_comes_before_the_poll_and_does_not_delay_it() {
        let mut claim = NextClaim::default();
        claim.record(&claims(Some(100 * MS)));
        assert_eq!([next(&mut claim), next(&mut claim)], [100, 100]);
        claim.record(&claims(Some(3000 * MS)));
        assert_eq!(next(&mut claim), 500);
        claim.record(&claims(None));
        assert_eq!(next(&mut claim), 1000);
    }
}
