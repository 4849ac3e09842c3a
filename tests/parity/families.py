"""Small models shaped as those of today's families, each with parts that the others do not have."""

SIZES = "model.layers=4 model.dim=48 model.heads=8 model.ffn_dim=34 model.context=24 model.vocab_multiple=128"
MODERN = f"{SIZES} model.norm=rmsnorm model.bias=false model.position=rotary"

# With a small norm_eps no norm of "speedrun" would see how large the first mix is: its gradient would be rounding.
FAMILIES = {
    "llama": f"{MODERN} model.ffn=swiglu model.kv_heads=4 model.tied_head=false model.rotary.theta=500.0 "
    "model.rotary.scaling=llama3 model.rotary.factor=4.0 model.rotary.original_context=8",
    "qwen2": f"{MODERN} model.ffn=swiglu model.kv_heads=4 model.fused_qkv=false model.qkv_bias=true "
    "model.tied_head=true model.vocab_multiple=1 model.norm_eps=1e-6",
    "qwen3": f"{MODERN} model.ffn=swiglu model.kv_heads=2 model.head_dim=10 model.qk_norm=head model.tied_head=true",
    "olmo": f"{MODERN} model.ffn=swiglu model.kv_heads=4 model.qk_norm=all model.norm_place=after "
    "model.tied_head=false model.window=5 model.full_every=2 model.rotary.theta=100.0 model.rotary.scaling=yarn "
    "model.rotary.factor=8.0 model.rotary.beta_fast=4.0 model.rotary.windows=false",
    "gemma": f"{MODERN} model.ffn=geglu model.kv_heads=4 model.head_dim=8 model.fused_qkv=false model.tied_head=true "
    "model.norm_place=both model.window=6 model.full_every=2 model.attention_softcap=2.0 model.logit_softcap=3.0 "
    "model.attention_scale=0.4 model.embedding_scale=7.0 model.rotary.scaling=linear model.rotary.factor=2.0",
    "qwen3 moe": f"{MODERN} model.ffn=swiglu model.kv_heads=4 model.qk_norm=head model.tied_head=false "
    "model.moe.experts=8 model.moe.top_k=2 model.moe.dim=22 model.moe.shared=1 model.moe.dense_layers=1 "
    "model.moe.balance=step model.moe.balance_weight=0.05 model.moe.z_loss=0.02 model.moe.bias_rate=0.02",
    "speedrun": f"{MODERN} model.ffn=relu2 model.head_dim=8 model.qk_norm=head model.norm_weight=false "
    "model.tied_head=false model.rotary.share=0.5 model.embedding_norm=true model.init_residual=zero "
    "model.init_std=0.05 model.init_embedding_std=0.3 model.x0=true model.skips=true model.value_embeddings=1 "
    "model.window=7 model.logit_softcap=3.0 model.norm_eps=0.1",
}

# Latent attention, groups of experts and further tokens.
LATENT = """model.dim=40 model.heads=8 model.context=24 model.position=rotary model.norm=rmsnorm model.bias=false
    model.fused_qkv=false model.ffn=swiglu model.ffn_dim=34 model.latent.kv_rank=14 model.latent.nope_dim=6
    model.latent.rope_dim=4 model.latent.value_dim=5 model.rotary.scaling=yarn model.rotary.factor=2
    model.rotary.original_context=12 model.rotary.magnitude=1.0 model.attention_scale=0.4"""
EXPERTS = """model.moe.experts=8 model.moe.top_k=3 model.moe.groups=4 model.moe.top_groups=2 model.moe.dim=22
    model.moe.shared=1 model.moe.dense_layers=1 model.moe.score=sigmoid model.moe.scale=2.5 model.moe.bias_rate=0.02
    model.moe.balance=sequence model.moe.balance_weight=0.03"""
DEEPSEEK = {
    "v3": f"{LATENT} {EXPERTS} model.layers=4 model.latent.q_rank=18 model.tied_head=false model.vocab_multiple=128 "
    "model.mtp=2 model.mtp_weight=0.4",
    "dense, tied": f"{LATENT} model.layers=4 model.tied_head=true model.vocab_multiple=1 model.mtp=1",
    "one further": f"{LATENT} model.layers=4 model.tied_head=false model.vocab_multiple=1 model.mtp=1",
    "alone": f"{LATENT} model.layers=4 model.tied_head=true model.vocab_multiple=128 model.qkv_bias=true",
}
