//! Who may call the server, and what is known of each kind of job.

use uuid::Uuid;

use super::Client;
use crate::error::Result;
use crate::store::{KindRecord, NewKind, NewToken, TokenRecord};

impl Client {
    // ---- tokens ----------------------------------------------------------

    /// Stores a token, of which only the hash is known here. The same one again
    /// changes nothing; an id or a hash that belongs to another is a conflict.
    ///
    /// ```
    /// # use longshore::{Client, store::NewToken};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// let shop = NewToken {
    ///     id: uuid::Uuid::now_v7(),
    ///     name: "the shop".into(),
    ///     hash: [7; 32],
    ///     scopes: vec!["enqueue".into()],
    ///     queues: Some(vec!["mail".into()]),
    ///     expires_at: None,
    /// };
    /// client.create_token(&shop).await?;
    /// assert!(client.token(&shop.hash).await?.is_some());
    /// client.revoke_token(shop.id).await?;
    /// assert!(client.token(&shop.hash).await?.is_none());
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn create_token(&self, token: &NewToken) -> Result<()> {
        self.store.put_token(token).await
    }

    /// The token of this hash, if it is neither revoked nor expired.
    pub async fn token(&self, hash: &[u8; 32]) -> Result<Option<TokenRecord>> {
        self.store.token(hash).await
    }

    /// All tokens, newest first, dead ones included.
    pub async fn tokens(&self) -> Result<Vec<TokenRecord>> {
        self.store.tokens().await
    }

    /// Ends a token for good; says whether there is one of that id.
    pub async fn revoke_token(&self, id: Uuid) -> Result<bool> {
        self.store.revoke_token(id).await
    }

    // ---- kinds -----------------------------------------------------------

    /// Says what is known of kinds of jobs. What is left out stays as it was.
    ///
    /// ```
    /// # use longshore::{Client, store::NewKind};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// let schema = serde_json::value::to_raw_value(&serde_json::json!({ "type": "object" })).unwrap();
    /// client.put_kinds(&[NewKind { schema: Some(schema), ..NewKind::new("mail") }]).await?;
    /// client.put_kinds(&[NewKind::new("mail")]).await?;
    /// assert!(client.kinds().await?[0].schema.is_some());
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn put_kinds(&self, kinds: &[NewKind]) -> Result<()> {
        self.store.put_kinds(kinds).await
    }

    /// All kinds by name.
    pub async fn kinds(&self) -> Result<Vec<KindRecord>> {
        self.store.kinds().await
    }

    /// Forgets a kind; says whether there was one. Its jobs stay.
    pub async fn remove_kind(&self, name: &str) -> Result<bool> {
        self.store.remove_kind(name).await
    }
}
