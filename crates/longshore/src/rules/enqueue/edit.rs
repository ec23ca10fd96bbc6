//! What an operator can change while a job waits.

use super::NewJob;
use crate::error::Result;
use crate::rules::lifecycle::When;

/// What an operator changes about a waiting job. Fields that are not set stay.
///
/// ```
/// let edit = longshore::Edit::default().priority(5);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Edit {
    priority: Option<i64>,
    when: Option<When>,
    payload: Option<String>,
}

impl Edit {
    /// Sets the priority.
    pub fn priority(mut self, priority: i64) -> Self {
        self.priority = Some(priority);
        self
    }

    /// Sets when the job is due.
    pub fn when(mut self, when: When) -> Self {
        self.when = Some(when);
        self
    }

    /// Sets the payload, as JSON text.
    pub fn payload(mut self, json: impl Into<String>) -> Self {
        self.payload = Some(json.into());
        self
    }

    /// Checks the new values with the rules of [`NewJob::validate`].
    pub fn validate(self) -> Result<ValidEdit> {
        let mut probe = match &self.payload {
            Some(payload) => NewJob::from_json("edit", payload),
            None => NewJob::new("edit", &()),
        };
        probe.priority = self.priority.unwrap_or(0);
        probe.when = self.when.unwrap_or(When::NOW);
        let valid = probe.validate()?;
        Ok(ValidEdit {
            priority: self.priority.map(|_| valid.priority),
            when: self.when,
            payload: self.payload.map(|_| valid.payload),
        })
    }
}

/// An edit that has passed every check.
#[derive(Clone, Debug)]
pub struct ValidEdit {
    pub(crate) priority: Option<i16>,
    pub(crate) when: Option<When>,
    pub(crate) payload: Option<String>,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_edit_is_checked_like_a_new_job() {
        let field = |edit: Edit| edit.validate().unwrap_err().field().unwrap().to_owned();
        assert_eq!(field(Edit::default().priority(99_999)), "priority");
        assert_eq!(field(Edit::default().payload("{oops")), "payload");
        assert_eq!(field(Edit::default().when(When::After(Duration::MAX))), "delay");
    }
}
