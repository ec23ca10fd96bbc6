//! The worker's metrics, through the `metrics` facade. They are visible if the program installs
//! a recorder before the worker starts; without one they cost almost nothing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Label, counter, gauge, histogram};

use super::Summary;
use super::context::Attempt;
use super::run_times::RunTime;
use crate::client::job_metrics::{COMPLETED, DURATION, OUTCOMES, STARTED};
use crate::job::Status;
use crate::store::Count;

/// The handles of a worker's metrics, looked up once per kind, not once per job.
#[derive(Default)]
pub(super) struct Metrics {
    kinds: RwLock<Kinds>,
    /// In the order of [`OUTCOMES`].
    ended: [AtomicU64; OUTCOMES.len()],
    depth: Gauges,
    oldest: Gauges,
}

#[derive(Default)]
struct Kinds {
    by_name: HashMap<String, Arc<Kind>>,
    /// In the order of [`Kind::index`].
    list: Vec<Arc<Kind>>,
}

/// The gauges of one metric, by label.
#[derive(Default)]
struct Gauges(Mutex<HashMap<Vec<Label>, Gauge>>);

impl Gauges {
    /// Sets the gauges to these values, and all earlier ones that are missing to zero: an empty
    /// queue has no count, and its gauge would otherwise keep the last value.
    fn set(&self, name: &'static str, values: impl IntoIterator<Item = (Vec<Label>, f64)>) {
        let mut gauges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing: HashMap<Vec<Label>, Gauge> = gauges.clone();
        for (labels, value) in values {
            missing.remove(&labels);
            let gauge = gauges.entry(labels.clone()).or_insert_with(|| gauge!(name, labels));
            gauge.set(value);
        }
        missing.values().for_each(|gauge| gauge.set(0.0));
    }
}

/// The metrics and the run time of one kind.
pub(super) struct Kind {
    pub(super) name: String,
    /// Its position in [`Metrics::kinds`].
    pub(super) index: usize,
    pub(super) run_time: RunTime,
    started: Counter,
    /// In the order of [`OUTCOMES`].
    completed: Vec<(Counter, Histogram)>,
}

/// In the order of [`OUTCOMES`].
const ENDS_THE_JOB: [bool; OUTCOMES.len()] = [true, false, true, true, false, false, false, false, false];

impl Kind {
    fn new(kind: &str, index: usize) -> Self {
        let handles = |outcome: &'static str| {
            let counted = counter!(COMPLETED, "kind" => kind.to_owned(), "outcome" => outcome);
            let timed = histogram!(DURATION, "kind" => kind.to_owned(), "outcome" => outcome);
            (counted, timed)
        };
        Kind {
            name: kind.to_owned(),
            index,
            run_time: RunTime::default(),
            started: counter!(STARTED, "kind" => kind.to_owned()),
            completed: OUTCOMES.into_iter().map(handles).collect(),
        }
    }
}

impl Metrics {
    pub(super) fn kind(&self, kind: &str) -> Arc<Kind> {
        if let Some(known) = self.read_kinds().by_name.get(kind) {
            return known.clone();
        }
        let mut kinds = self.kinds.write().unwrap_or_else(PoisonError::into_inner);
        let Kinds { by_name, list } = &mut *kinds;
        let fresh = || {
            list.push(Arc::new(Kind::new(kind, list.len())));
            list[list.len() - 1].clone()
        };
        by_name.entry(kind.to_owned()).or_insert_with(fresh).clone()
    }

    /// Calls `each` with every kind of which this worker has claimed a job.
    pub(super) fn for_each_kind(&self, each: impl FnMut(&Arc<Kind>)) {
        self.read_kinds().list.iter().for_each(each);
    }

    fn read_kinds(&self) -> RwLockReadGuard<'_, Kinds> {
        self.kinds.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an attempt as started, once.
    pub(super) fn started(&self, attempt: &Attempt) {
        if attempt.mark_started() {
            attempt.kind.started.increment(1);
        }
    }

    /// Counts an attempt as completed, once, and only if it was counted as started: so the
    /// difference of the two counters is the number of attempts in flight. `ran` is `None` if its
    /// handler was never called.
    pub(super) fn completed(&self, attempt: &Attempt, outcome: &'static str, ran: Option<Duration>) {
        let Some(nth) = OUTCOMES.iter().position(|known| *known == outcome) else { return };
        let Some(was_started) = attempt.mark_completed() else { return };
        // The summary also counts jobs that ended before their start.
        if was_started || ENDS_THE_JOB[nth] {
            self.ended[nth].fetch_add(1, Ordering::Relaxed);
        }
        if was_started {
            let (counted, timed) = &attempt.kind.completed[nth];
            counted.increment(1);
            if let Some(ran) = ran {
                timed.record(ran);
            }
        }
    }

    pub(super) fn summary(&self) -> Summary {
        let [succeeded, retrying, failed_permanent, cancelled, snoozed, suspended, released, ..] =
            std::array::from_fn::<u64, { OUTCOMES.len() }, _>(|nth| self.ended[nth].load(Ordering::Relaxed));
        Summary { succeeded, retrying, failed_permanent, cancelled, put_back: snoozed + suspended + released }
    }

    pub(super) fn claimed(&self, jobs: usize, took: Duration) {
        histogram!("longshore_claim_batch_jobs").record(jobs as f64);
        histogram!("longshore_claim_seconds").record(took);
    }

    pub(super) fn settled(&self, jobs: usize, took: Duration) {
        histogram!("longshore_settle_batch_jobs").record(jobs as f64);
        histogram!("longshore_settle_seconds").record(took);
    }

    /// Sets the number of waiting and running jobs, per queue.
    pub(super) fn set_depth(&self, counts: &[Count]) {
        let live = counts
            .iter()
            .filter(|count| matches!(count.status, Status::Queued | Status::Retrying | Status::Running));
        let mut queues = HashMap::<(&str, &'static str), u64>::new();
        for count in live {
            *queues.entry((&count.queue, count.status.as_str())).or_default() += count.jobs;
        }
        let labels =
            |queue: &str, status| vec![Label::new("queue", queue.to_owned()), Label::new("status", status)];
        let values = queues.into_iter().map(|((queue, status), jobs)| (labels(queue, status), jobs as f64));
        self.depth.set("longshore_queue_jobs", values);
    }

    /// Sets the age of the oldest due job, per queue.
    pub(super) fn set_overdue(&self, overdue: &[(String, Duration)]) {
        let values = overdue
            .iter()
            .map(|(queue, due_for)| (vec![Label::new("queue", queue.clone())], due_for.as_secs_f64()));
        self.oldest.set("longshore_queue_oldest_ready_seconds", values);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use metrics::{Key, KeyName, Metadata, Recorder, SharedString, Unit, with_local_recorder};

    use super::*;

    /// A recorder that keeps gauges by name and labels.
    #[derive(Default)]
    struct GaugeRecorder(Mutex<HashMap<Key, Arc<AtomicU64>>>);

    impl GaugeRecorder {
        fn value(&self, key: &Key) -> f64 {
            f64::from_bits(self.0.lock().unwrap()[key].load(Ordering::Relaxed))
        }
    }

    impl Recorder for GaugeRecorder {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
            Counter::noop()
        }
        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.0.lock().unwrap().entry(key.clone()).or_default().clone())
        }
        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    #[test]
    fn the_gauges_of_a_queue_that_became_empty_are_set_to_zero() {
        let (recorder, metrics) = (GaugeRecorder::default(), Metrics::default());
        let waiting = |queue: &str, jobs| Count {
            status: Status::Queued,
            queue: queue.into(),
            kind: "greet".into(),
            jobs,
            estimated: false,
        };
        let labels = vec![Label::new("queue", "mail"), Label::new("status", "queued")];
        let depth = Key::from_parts("longshore_queue_jobs", labels);
        let oldest =
            Key::from_parts("longshore_queue_oldest_ready_seconds", vec![Label::new("queue", "mail")]);
        with_local_recorder(&recorder, || {
            metrics.set_depth(&[waiting("mail", 3), waiting("mail", 4)]);
            metrics.set_overdue(&[("mail".into(), Duration::from_secs(9))]);
            assert_eq!((recorder.value(&depth), recorder.value(&oldest)), (7.0, 9.0));
            metrics.set_depth(&[waiting("images", 1)]);
            metrics.set_overdue(&[]);
            assert_eq!((recorder.value(&depth), recorder.value(&oldest)), (0.0, 0.0));
            metrics.set_depth(&[waiting("mail", 2)]);
            assert_eq!(recorder.value(&depth), 2.0);
        });
    }
}
