//! `longshore enqueue-many`: enqueues jobs from a file of JSON lines, in batches.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::MAX_PAYLOAD;
use crate::args::EnqueueMany;
use crate::endpoint::Endpoint;
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Out, Progress};

/// The size of one request: below the API's limits, and small enough for the progress bar to
/// move.
const MAX_BATCH_JOBS: usize = 1000;
const MAX_BATCH_BYTES: usize = 8 * 1024 * 1024;
/// The largest payload plus room for the job's other fields. Longer lines are rejected, so
/// that an endless line cannot fill the memory.
const MAX_LINE: usize = MAX_PAYLOAD + 256 * 1024;

/// Jobs to send in one request, each with its line number.
#[derive(Default)]
struct Batch {
    jobs: Vec<Box<RawValue>>,
    lines: Vec<u64>,
    bytes: usize,
}

/// The response to a batch.
#[derive(Deserialize)]
struct BatchResponse {
    items: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    outcome: String,
    message: Option<String>,
}

#[derive(Default)]
struct Totals {
    created: u64,
    existing: u64,
    refused: u64,
}

pub(in crate::commands) async fn enqueue_many(endpoint: &Endpoint, args: &EnqueueMany, out: &Out) -> Outcome {
    let (mut input, size): (Box<dyn BufRead>, u64) = match args.file.as_str() {
        "-" => (Box::new(io::stdin().lock()), 0),
        path => {
            let file = File::open(path).map_err(|error| unreadable(path, &error))?;
            let size = file.metadata().map_or(0, |about| about.len());
            (Box::new(BufReader::new(file)), size)
        }
    };
    let mut progress = Progress::of(size);
    let (mut totals, mut batch) = (Totals::default(), Batch::default());
    for number in 1.. {
        let line = next_line(&mut input).map_err(|error| unreadable(&args.file, &error))?;
        let is_last = line.is_empty();
        progress.advance(line.len() as u64);
        match parse(line) {
            None => {}
            Some(Ok(job)) => batch.add(job, number),
            Some(Err(why)) => report_refused(&mut totals, number, &why, out),
        }
        if is_last || batch.is_full() {
            send(endpoint, std::mem::take(&mut batch), &mut totals, out).await?;
        }
        if is_last {
            break;
        }
    }
    drop(progress);
    let Totals { created, existing, refused } = totals;
    if out.json {
        out.document(&json!({ "created": created, "existing": existing, "refused": refused }));
    } else {
        out.line(format_args!("created: {created}, existing: {existing}, refused: {refused}"));
    }
    Ok(if refused == 0 { Code::Done } else { Code::Usage })
}

impl Batch {
    fn add(&mut self, job: Box<RawValue>, line: u64) {
        self.bytes += job.get().len();
        self.jobs.push(job);
        self.lines.push(line);
    }

    fn is_full(&self) -> bool {
        self.jobs.len() >= MAX_BATCH_JOBS || self.bytes >= MAX_BATCH_BYTES
    }
}

/// The next line including its line break; empty at the end of the input.
fn next_line(input: &mut dyn BufRead) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    input.take(MAX_LINE as u64).read_until(b'\n', &mut line)?;
    if line.len() == MAX_LINE && !line.ends_with(b"\n") {
        Err(io::Error::other(format!("a line is longer than {MAX_LINE} bytes")))
    } else {
        Ok(line)
    }
}

/// The JSON of a line; `None` for an empty line. It stays text, like every payload.
fn parse(line: Vec<u8>) -> Option<Result<Box<RawValue>, String>> {
    if line.trim_ascii().is_empty() {
        return None;
    }
    let text = String::from_utf8(line).map_err(|_| "not UTF-8".to_owned());
    Some(text.and_then(|text| {
        RawValue::from_string(text.trim_end().to_owned()).map_err(|error| {
            // The parser saw only this line, so its line number is always 1.
            let why = error.to_string().replace(" at line 1 column ", " at column ");
            format!("not JSON: {why}; write one job per line")
        })
    }))
}

async fn send(endpoint: &Endpoint, batch: Batch, totals: &mut Totals, out: &Out) -> Result<(), Failure> {
    if batch.jobs.is_empty() {
        return Ok(());
    }
    let reply = endpoint.post(&["jobs", "batch"]).body(&batch.jobs).send().await.map_err(|failure| {
        Failure::new(
            failure.code,
            format_args!(
                "{failure}; the lines before line {} are enqueued, later ones may not be",
                batch.lines[0]
            ),
        )
    })?;
    for (item, line) in reply.read::<BatchResponse>()?.items.iter().zip(&batch.lines) {
        match item.outcome.as_str() {
            "created" => totals.created += 1,
            "refused" => report_refused(totals, *line, item.message.as_deref().unwrap_or("refused"), out),
            _ => totals.existing += 1,
        }
    }
    Ok(())
}

fn report_refused(totals: &mut Totals, line: u64, why: &str, out: &Out) {
    totals.refused += 1;
    out.note(format_args!("error: line {line}: {why}"));
}

fn unreadable(source: &str, error: &io::Error) -> Failure {
    Failure::usage(format_args!(
        "cannot read {source}: {error}; give a file of JSON lines, or - for standard input"
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_endless_line_is_rejected() {
        let mut endless = BufReader::new(io::repeat(b' '));
        assert!(next_line(&mut endless).unwrap_err().to_string().contains("longer than"));
    }

    #[test]
    fn the_text_of_a_line_is_not_changed() {
        let mut input = &b"{\"a\": 1.00}\n\n  \nx\n{}"[..];
        let mut next = || parse(next_line(&mut input).unwrap());
        assert_eq!(next().unwrap().unwrap().get(), "{\"a\": 1.00}");
        assert!(next().is_none() && next().is_none());
        assert!(next().unwrap().unwrap_err().contains("not JSON"));
        assert_eq!(next().unwrap().unwrap().get(), "{}", "the last line needs no line break");
        assert!(next().is_none());
    }

    #[test]
    fn a_batch_is_full_at_a_number_of_jobs_or_of_bytes() {
        let job = |bytes: usize| RawValue::from_string(format!("\"{}\"", "x".repeat(bytes))).unwrap();
        let mut large = Batch::default();
        large.add(job(MAX_BATCH_BYTES), 1);
        assert!(large.is_full());
        let mut many = Batch::default();
        for line in 1..=MAX_BATCH_JOBS as u64 {
            assert!(!many.is_full());
            many.add(job(1), line);
        }
        assert!(many.is_full());
    }
}
