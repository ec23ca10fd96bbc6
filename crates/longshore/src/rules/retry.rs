//! How long a job waits after a failed attempt. Pure: maps (policy, attempt, seed) to a delay.
//!
//! This module owns only the delay. [`lifecycle`](crate::rules::lifecycle) decides whether there is
//! another attempt.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The longest delay that a policy may contain or return: ten years, so that adding it to a
/// timestamp cannot overflow.
pub const MAX_DELAY: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// When a failed attempt is retried. Stored with the job as JSON.
///
/// ```
/// use std::time::Duration;
/// use longshore::RetryPolicy;
///
/// let policy = RetryPolicy::exponential();
/// assert_eq!(policy.delay(1, 0), Some(Duration::from_secs(4)));
/// assert_eq!(policy.delay(2, 0), Some(Duration::from_secs(8)));
/// assert_eq!(RetryPolicy::None.delay(1, 0), None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "policy", rename_all = "snake_case", deny_unknown_fields)]
pub enum RetryPolicy {
    /// Uniform in `[base, min(cap, base · 3^attempt)]`: spreads the retries of jobs that failed
    /// together. The default, with 1 s and 60 s.
    Jitter {
        /// The shortest delay.
        #[serde(rename = "base_ms", with = "as_millis")]
        base: Duration,
        /// The longest delay.
        #[serde(rename = "cap_ms", with = "as_millis")]
        cap: Duration,
    },
    /// `2^(attempt+1)` seconds: 4 s after the first failure, up to `cap`.
    Exponential {
        /// The longest delay.
        #[serde(rename = "cap_ms", with = "as_millis")]
        cap: Duration,
    },
    /// Always the same delay.
    Fixed {
        /// The delay.
        #[serde(rename = "delay_ms", with = "as_millis")]
        delay: Duration,
    },
    /// One delay per failed attempt; the last one repeats.
    List {
        /// The delays, first failure first.
        #[serde(rename = "delays_ms", with = "millis_list")]
        delays: Vec<Duration>,
    },
    /// No retry: the first failure is final, regardless of `max_attempts`.
    None,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        RetryPolicy::Jitter { base: Duration::from_secs(1), cap: Duration::from_secs(60) }
    }
}

impl RetryPolicy {
    /// `2^(attempt+1)` seconds, capped at `2^20` seconds (about twelve days).
    pub fn exponential() -> Self {
        RetryPolicy::Exponential { cap: Duration::from_secs(1 << 20) }
    }

    /// The same delay after every failure.
    pub fn fixed(delay: Duration) -> Self {
        RetryPolicy::Fixed { delay }
    }

    /// These delays in turn; the last one repeats.
    pub fn list(delays: impl Into<Vec<Duration>>) -> Self {
        RetryPolicy::List { delays: delays.into() }
    }

    /// The delay after failed attempt number `attempt` (the first is 1), or `None` if the policy
    /// allows no retry. `seed` determines the jitter, so the same job and attempt always get the
    /// same delay.
    pub fn delay(&self, attempt: u32, seed: u64) -> Option<Duration> {
        let delay = match self {
            RetryPolicy::Jitter { base, cap } => {
                let ceiling = base.saturating_mul(3u32.saturating_pow(attempt)).min(*cap);
                uniform(*base, ceiling.max(*base), seed ^ u64::from(attempt))
            }
            RetryPolicy::Exponential { cap } => {
                let exponent = attempt.saturating_add(1).min(62);
                Duration::from_secs(1 << exponent).min(*cap)
            }
            RetryPolicy::Fixed { delay } => *delay,
            RetryPolicy::List { delays } => {
                let nth = (attempt.max(1) - 1) as usize;
                *delays.get(nth).or(delays.last())?
            }
            RetryPolicy::None => return None,
        };
        Some(delay.min(MAX_DELAY))
    }

    /// The longest duration in the policy.
    fn longest(&self) -> Option<Duration> {
        match self {
            RetryPolicy::Jitter { base, cap } => Some(*base.max(cap)),
            RetryPolicy::Exponential { cap: delay } | RetryPolicy::Fixed { delay } => Some(*delay),
            RetryPolicy::List { delays } => delays.iter().max().copied(),
            RetryPolicy::None => None,
        }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::invalid("retry", message));
        if let Some(longest) = self.longest().filter(|longest| *longest > MAX_DELAY) {
            return refuse(format!(
                "retry: {} ms is longer than ten years; use at most {}",
                longest.as_millis(),
                MAX_DELAY.as_millis()
            ));
        }
        match self {
            RetryPolicy::Jitter { base, cap } if base > cap => refuse(format!(
                "retry: base ({base:?}) is above cap ({cap:?}); raise the cap or lower the base"
            )),
            RetryPolicy::List { delays } if delays.is_empty() => {
                refuse("retry: the list of delays is empty; add a delay, or use the policy `none`".into())
            }
            RetryPolicy::List { delays } if delays.len() > 1000 => refuse(format!(
                "retry: the list has {} delays; use at most 1000, because the last one repeats",
                delays.len()
            )),
            _ => Ok(()),
        }
    }
}

/// Uniform in `[low, high]`, both ends included, to the microsecond.
fn uniform(low: Duration, high: Duration, seed: u64) -> Duration {
    let span = u64::try_from((high - low).as_micros()).unwrap_or(u64::MAX - 1);
    // Multiply-shift maps 64 random bits to 0..=span without the bias of `%`.
    let offset = (u128::from(scramble(seed)) * (u128::from(span) + 1)) >> 64;
    low + Duration::from_micros(offset as u64)
}

/// The splitmix64 finaliser: adjacent seeds (ids created in the same millisecond, attempts 1, 2,
/// 3) must not give similar delays.
fn scramble(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

pub(crate) mod as_millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(delay: &Duration, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_u64(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Duration, D::Error> {
        u64::deserialize(input).map(Duration::from_millis)
    }
}

mod millis_list {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(delays: &[Duration], out: S) -> Result<S::Ok, S::Error> {
        out.collect_seq(delays.iter().map(|delay| u64::try_from(delay.as_millis()).unwrap_or(u64::MAX)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<Duration>, D::Error> {
        let delays = Vec::<u64>::deserialize(input)?;
        Ok(delays.into_iter().map(Duration::from_millis).collect())
    }
}

/// A duration in the unit that both engines store, capped at ten years. Longer ones
/// would make no difference.
pub(crate) fn millis(duration: Duration) -> i64 {
    duration.min(MAX_DELAY).as_millis().max(1) as i64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn any_policy() -> impl Strategy<Value = RetryPolicy> {
        let millis = || (0u64..=u64::MAX / 2_000).prop_map(Duration::from_millis);
        prop_oneof![
            (millis(), millis()).prop_map(|(a, b)| RetryPolicy::Jitter { base: a.min(b), cap: a.max(b) }),
            millis().prop_map(|cap| RetryPolicy::Exponential { cap }),
            millis().prop_map(|delay| RetryPolicy::Fixed { delay }),
            prop::collection::vec(millis(), 1..9).prop_map(|delays| RetryPolicy::List { delays }),
            Just(RetryPolicy::None),
        ]
    }

    proptest! {
        #[test]
        fn default_delay_stays_between_one_second_and_its_ceiling(attempt in 1u32..2_000_000_000, seed: u64) {
            let ceiling = SECOND.saturating_mul(3u32.saturating_pow(attempt)).min(60 * SECOND);
            let delay = RetryPolicy::default().delay(attempt, seed).unwrap();
            prop_assert!(delay >= SECOND && delay <= ceiling, "{delay:?} not in 1s..={ceiling:?}");
        }

        #[test]
        fn no_policy_overflows_or_exceeds_the_maximum_delay(policy in any_policy(), attempt: u32, seed: u64) {
            if let Some(delay) = policy.delay(attempt, seed) {
                prop_assert!(delay <= MAX_DELAY);
            }
        }

        #[test]
        fn jitter_stays_within_base_and_cap(base in 1u64..100_000, extra in 0u64..10_000_000, attempt in 1u32..50, seed: u64) {
            let (base, cap) = (Duration::from_millis(base), Duration::from_millis(base + extra));
            let delay = RetryPolicy::Jitter { base, cap }.delay(attempt, seed).unwrap();
            prop_assert!((base..=cap).contains(&delay));
        }

        #[test]
        fn the_same_seed_gives_the_same_delay(policy in any_policy(), attempt in 1u32..50, seed: u64) {
            prop_assert_eq!(policy.delay(attempt, seed), policy.delay(attempt, seed));
        }

        #[test]
        fn every_policy_is_read_back_as_stored(policy in any_policy()) {
            let stored = serde_json::to_string(&policy).unwrap();
            prop_assert_eq!(serde_json::from_str::<RetryPolicy>(&stored).unwrap(), policy);
        }
    }

    #[test]
    fn jitter_covers_both_halves_of_its_range() {
        let delays: Vec<_> = (0..1000).map(|seed| RetryPolicy::default().delay(9, seed).unwrap()).collect();
        let low = delays.iter().filter(|delay| **delay < 30 * SECOND).count();
        assert!((350..650).contains(&low), "{low} of 1000 in the lower half");
    }

    #[test]
    fn exponential_starts_at_four_seconds_and_doubles_to_its_cap() {
        let seconds = |n| RetryPolicy::exponential().delay(n, 7).unwrap().as_secs();
        assert_eq!([seconds(1), seconds(2), seconds(3)], [4, 8, 16]);
        assert_eq!([seconds(19), seconds(20), seconds(u32::MAX)], [1 << 20; 3]);
    }

    #[test]
    fn list_repeats_its_last_delay() {
        let policy = RetryPolicy::list([SECOND, 5 * SECOND]);
        let delays: Vec<_> = (1..=4).map(|n| policy.delay(n, 0).unwrap().as_secs()).collect();
        assert_eq!(delays, [1, 5, 5, 5]);
    }

    #[test]
    fn fixed_never_changes_and_none_never_retries() {
        assert_eq!(RetryPolicy::fixed(SECOND).delay(41, 3), Some(SECOND));
        assert_eq!(RetryPolicy::None.delay(1, 3), None);
    }

    #[test]
    fn a_delay_too_long_to_store_is_stored_as_the_maximum() {
        for policy in [RetryPolicy::fixed(Duration::MAX), RetryPolicy::list([Duration::MAX])] {
            let stored = serde_json::to_string(&policy).unwrap();
            assert!(stored.contains(&u64::MAX.to_string()), "{stored}");
        }
    }

    #[test]
    fn impossible_policies_are_refused_by_field() {
        for policy in [RetryPolicy::Jitter { base: 2 * SECOND, cap: SECOND }, RetryPolicy::list([])] {
            assert_eq!(policy.validate().unwrap_err().field(), Some("retry"));
        }
    }
}
