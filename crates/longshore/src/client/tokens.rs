//! API tokens.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::Client;
use crate::error::Result;
use crate::store::{NewSession, NewToken, TokenRecord};

impl Client {
    /// Stores a token by the hash of its secret. Storing the same token again changes
    /// nothing. Returns a conflict error if the id or the hash belongs to another token.
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

    /// Finds the token with this hash, if it is neither revoked nor expired.
    pub async fn token(&self, hash: &[u8; 32]) -> Result<Option<TokenRecord>> {
        Ok(self.store.tokens_by_hash(std::slice::from_ref(hash)).await?.pop().flatten())
    }

    /// As [`token`](Client::token), for several hashes; the results are in the same order.
    #[doc(hidden)]
    pub async fn tokens_by_hash(&self, hashes: &[[u8; 32]]) -> Result<Vec<Option<TokenRecord>>> {
        self.store.tokens_by_hash(hashes).await
    }

    /// Stores a session, which stands for its token until it expires. Returns when it does.
    #[doc(hidden)]
    pub async fn create_session(&self, session: &NewSession) -> Result<DateTime<Utc>> {
        self.store.put_session(session).await
    }

    /// Removes a session. Returns whether it existed.
    #[doc(hidden)]
    pub async fn remove_session(&self, hash: &[u8; 32]) -> Result<bool> {
        self.store.remove_session(hash).await
    }

    /// Lists all tokens, newest first, including revoked and expired ones.
    pub async fn tokens(&self) -> Result<Vec<TokenRecord>> {
        self.store.tokens().await
    }

    /// Revokes a token. Returns whether it exists.
    pub async fn revoke_token(&self, id: Uuid) -> Result<bool> {
        self.store.revoke_token(id).await
    }
}
