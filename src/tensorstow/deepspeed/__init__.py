"""DeepSpeed's names over tensorstow's engine: ``import tensorstow.deepspeed as deepspeed``."""
