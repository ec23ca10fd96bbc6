//! Server-sent events out of the pieces in which they arrive.

/// One event.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) id: Option<String>,
    pub(super) name: String,
    pub(super) data: String,
}

/// What has arrived and is not yet a whole event. A piece may end anywhere, even
/// within a character.
#[derive(Debug, Default)]
pub(super) struct Parser {
    rest: Vec<u8>,
    event: Event,
}

impl Parser {
    /// The events that a piece completes.
    pub(super) fn push(&mut self, piece: &[u8]) -> Vec<Event> {
        self.rest.extend_from_slice(piece);
        let mut events = Vec::new();
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            events.extend(self.line(line.trim_end_matches(['\n', '\r'])));
        }
        events
    }

    fn line(&mut self, line: &str) -> Option<Event> {
        if line.is_empty() {
            // Signs of life and advice about coming back hold no data.
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
    fn events_are_read_whatever_the_pieces() {
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
                text.as_bytes().chunks(size).flat_map(|piece| parser.push(piece)).collect();
            assert_eq!(events, expected, "pieces of {size}");
        }
    }
}
