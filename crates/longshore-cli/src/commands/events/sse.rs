//! A parser for server-sent events that arrive in chunks.

/// One event.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) id: Option<String>,
    pub(super) name: String,
    pub(super) data: String,
}

/// The largest event.
const MAX_EVENT: usize = 4 * 1024 * 1024;

/// Holds the data of an incomplete event. A chunk may end anywhere, even within a character.
#[derive(Debug, Default)]
pub(super) struct Parser {
    rest: Vec<u8>,
    event: Event,
}

impl Parser {
    /// Adds a chunk and returns the events that it completes.
    pub(super) fn push(&mut self, chunk: &[u8]) -> Vec<Event> {
        // Earlier chunks contain no other end of a line.
        let mut searched = self.rest.len();
        self.rest.extend_from_slice(chunk);
        let mut events = Vec::new();
        while let Some(end) = self.rest[searched..].iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=searched + end).collect();
            searched = 0;
            let line = String::from_utf8_lossy(&line);
            events.extend(self.line(line.trim_end_matches(['\n', '\r'])));
        }
        events
    }

    /// Whether the incomplete event is larger than any that a server of ours sends.
    pub(super) fn is_too_large(&self) -> bool {
        self.rest.len() + self.event.data.len() > MAX_EVENT
    }

    fn line(&mut self, line: &str) -> Option<Event> {
        if line.is_empty() {
            // Keep-alives and reconnect delays have no data.
            return Some(std::mem::take(&mut self.event)).filter(|event| !event.data.is_empty());
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "id" => self.event.id = Some(value.to_owned()),
            "event" => value.clone_into(&mut self.event.name),
            "data" if self.event.data.is_empty() => value.clone_into(&mut self.event.data),
            "data" => self.event.data.extend(["\n", value]),
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endless_event_is_noticed() {
        for chunk in ["x".repeat(1024), format!("data: {}\n", "x".repeat(1024))] {
            let mut parser = Parser::default();
            let pushes = (0..2 * MAX_EVENT / 1024).take_while(|_| {
                assert!(parser.push(chunk.as_bytes()).is_empty());
                !parser.is_too_large()
            });
            assert!(pushes.count() <= MAX_EVENT / 1024);
        }
    }

    #[test]
    fn events_are_parsed_from_chunks_of_any_size() {
        let text = "retry: 2000\n\nid: a-1\nevent: job\ndata: {\"kind\":\"grüß\"}\n\n:\n\n\
                    event: reset\r\ndata: {}\r\n\r\nid: a-2\n";
        let event = |id: Option<&str>, name: &str, data: &str| Event {
            id: id.map(str::to_owned),
            name: name.into(),
            data: data.into(),
        };
        let expected = [event(Some("a-1"), "job", "{\"kind\":\"grüß\"}"), event(None, "reset", "{}")];
        for size in 1..text.len() {
            let mut parser = Parser::default();
            let events: Vec<Event> =
                text.as_bytes().chunks(size).flat_map(|chunk| parser.push(chunk)).collect();
            assert_eq!(events, expected, "chunks of {size}");
        }
    }
}
