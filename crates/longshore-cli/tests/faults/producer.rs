//! Callers that enqueue in this process all the time, while a test disturbs their database.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use longshore::{Client, JobId, NewJob};

pub(crate) fn run(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(work);
}

/// When an enqueue began, and the jobs that it stored.
type Stored = (Instant, Vec<JobId>);

/// A caller that enqueues all the time, and goes on after an error as an HTTP client
/// does.
pub(crate) struct Producer {
    stored: Arc<Mutex<Vec<Stored>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Producer {
    /// Producers of single jobs, of jobs with a key, and of batches.
    pub(crate) fn start_all(client: &Client) -> [Self; 3] {
        let singles = Producer::start(client, |client| async move {
            let job = NewJob::new("mail", &1);
            client.enqueue(job).await.map(|enqueued| vec![enqueued.id])
        });
        let keyed = Producer::start(client, |client| async move {
            let job = NewJob::new("mail", &2).idempotency_key(JobId::new().to_string());
            client.enqueue(job).await.map(|enqueued| vec![enqueued.id])
        });
        let batches = Producer::start(client, |client| async move {
            let enqueued = client.enqueue_many([NewJob::new("mail", &3), NewJob::new("mail", &4)]).await?;
            Ok(enqueued.into_iter().map(|enqueued| enqueued.id).collect())
        });
        [singles, keyed, batches]
    }

    pub(crate) fn start<Enqueue, Enqueueing>(client: &Client, enqueue: Enqueue) -> Self
    where
        Enqueue: Fn(Client) -> Enqueueing + Send + 'static,
        Enqueueing: Future<Output = longshore::Result<Vec<JobId>>> + Send,
    {
        let stored = Arc::<Mutex<Vec<Stored>>>::default();
        let (client, list) = (client.clone(), stored.clone());
        let task = tokio::spawn(async move {
            loop {
                let began = Instant::now();
                if let Ok(ids) = enqueue(client.clone()).await {
                    list.lock().unwrap().push((began, ids));
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Producer { stored, task }
    }

    pub(crate) async fn wait_for_jobs_started_after(&self, after: Instant) {
        let began = Instant::now();
        while !self.stored.lock().unwrap().iter().any(|(started, _)| *started > after) {
            assert!(began.elapsed() < crate::fleet::MAX_WAIT, "nothing is stored any more");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) fn acknowledged(&self) -> Vec<JobId> {
        self.task.abort();
        self.stored.lock().unwrap().iter().flat_map(|(_, ids)| ids.clone()).collect()
    }
}
